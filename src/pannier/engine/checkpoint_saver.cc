#include "pannier/engine/checkpoint_saver.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/comm/collective_error.h"
#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/random_states.h"
#include "pannier/engine/shared_outcome.h"
#include "pannier/io/checksum.h"
#include "pannier/optim/bucket_states.h"

namespace pannier {
namespace {

using ckpt::chunk_end;

constexpr const char* kShareFile = "rank";
constexpr const char* kExtraFile = "extra";

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    throw IoError(fmt::format("make folder '{}'", path), error.value());
  }
}

// The folder's own name must be durable too, or what is in it is lost with it.
void sync_parents(const SavePlace& place) {
  ckpt::SealedFolder(place.folder).sync();
  const auto parent = std::filesystem::absolute(place.folder).lexically_normal().parent_path();
  ckpt::SealedFolder(parent.empty() ? "/" : parent.string()).sync();
}

at::Tensor contiguous(const at::Tensor& tensor) { return tensor.detach().contiguous(); }

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

}  // namespace

std::string CheckpointSaver::save(const SavePlace& place, const CheckpointContents& contents, std::int64_t step,
                                  const std::map<std::string, std::string>& attributes) {
  const c10::NoGradGuard no_grad;
  const Agreed agreed = agree(place, contents);
  const std::string path = place.folder + "/" + agreed.tag;
  std::vector<std::string> shares;
  try {
    shares = done_by_all(ranks_, "the shares of a checkpoint", [&] {
      const ckpt::SealedFolder folder = ckpt::SealedFolder(place.folder).folder(agreed.tag);
      const ckpt::Share share = write_share(folder, contents, agreed);
      folder.sync();
      return format_share(share);
    });
  } catch (const CollectiveError&) {
    throw;  // Rank 0 may have heard of all shares, and be about to name them.
  } catch (...) {
    remove_own(path, agreed);
    throw;
  }
  (void)done_by_all(ranks_, "the commit of a checkpoint", [&] {
    if (ranks_.rank() == 0) {
      ckpt::Share written;
      for (std::size_t rank = 0; rank < shares.size(); ++rank) {
        written.append(ckpt::parse_share(shares[rank], fmt::format("the share of rank {}", rank)));
      }
      ckpt::Manifest manifest = manifest_of(contents, std::move(written));
      manifest.step = step;
      manifest.attributes.insert(attributes.begin(), attributes.end());
      sync_parents(place);
      write_manifest(ckpt::SealedFolder(place.folder).folder(agreed.tag), manifest);
      const ckpt::CheckpointFolder folder(place.folder);
      if (place.set_latest) {
        folder.set_latest(agreed.tag);
      }
      (void)folder.remove_leftovers(agreed.tag);
    }
    return std::string();
  });
  return path;
}

// Nothing will ever name them, and the disk may be full.
void CheckpointSaver::remove_own(const std::string& path, const Agreed& agreed) const {
  try {
    const ckpt::SealedFolder folder(path);
    for (const char* what : {kShareFile, kExtraFile}) {
      folder.remove(ckpt::share_file_name(agreed.save, ranks_.rank(), what));
    }
  } catch (const IoError& error) {
    log::warning(fmt::format("files of a save that failed stay: {}", error.what()));
  }
}

// What a rank says: its tag, a name for the save, and the sums of its buffers.
CheckpointSaver::Agreed CheckpointSaver::agree(const SavePlace& place, const CheckpointContents& contents) {
  const std::vector<std::string> said = done_by_all(ranks_, "the tag of a checkpoint", [&] {
    if (!ckpt::is_plain_name(place.tag)) {
      throw ConfigError(fmt::format("'{}' is no tag: letters, digits, '.', '_' and '-' only", place.tag));
    }
    make_folders(place.folder + "/" + place.tag);
    std::string text = fmt::format("{} {}", place.tag, ckpt::new_save_name());
    if (ranks_.world_size() > 1) {
      for (const auto& buffer : contents.buffers) {
        text += fmt::format(" {:x}", sum_of(buffer.tensor));
      }
    }
    return text;
  });
  std::vector<std::string> tags;
  for (const auto& text : said) {
    tags.push_back(words_of(text).front());
  }
  const std::vector<std::string> first = words_of(said.front());
  Agreed agreed{.tag = choose_tag(tags), .save = first.at(1), .buffer_sums = {}};
  for (std::size_t i = 2; i < first.size(); ++i) {
    agreed.buffer_sums.push_back(std::stoull(first[i], nullptr, 16));
  }
  return agreed;
}

std::string CheckpointSaver::choose_tag(const std::vector<std::string>& tags) const {
  const auto other = std::find_if(tags.begin(), tags.end(), [&](const auto& tag) { return tag != tags.front(); });
  if (other != tags.end() && validation_ != TagValidation::kIgnore) {
    const std::string message = fmt::format("save_checkpoint() was given tag '{}' on rank {}, '{}' on rank 0", *other,
                                            other - tags.begin(), tags.front());
    if (validation_ == TagValidation::kFail) {
      throw ConfigError(message);
    }
    if (ranks_.rank() == 0) {
      log::warning(message + ", which all use");
    }
  }
  return tags.front();
}

std::uint64_t CheckpointSaver::sum_of(const at::Tensor& tensor) {
  const at::Tensor flat = contiguous(tensor);
  std::vector<std::byte> bytes(flat.nbytes());
  bytes_to_host(device_, bytes.data(), flat, 0, bytes.size());
  return checksum(bytes);
}

// A parameter that is not trained is the same on all ranks: each writes about as many bytes of them. Buffers are
// rank 0's.
std::vector<NamedTensor> CheckpointSaver::own_untrained(const CheckpointContents& contents) const {
  std::vector<NamedTensor> own;
  std::vector<std::size_t> nbytes(static_cast<std::size_t>(ranks_.world_size()));
  for (const auto& named : contents.frozen) {
    const auto least = std::min_element(nbytes.begin(), nbytes.end());
    *least += named.tensor.nbytes();
    if (least - nbytes.begin() == ranks_.rank()) {
      own.push_back(named);
    }
  }
  if (ranks_.rank() == 0) {
    own.insert(own.end(), contents.buffers.begin(), contents.buffers.end());
  }
  return own;
}

// In the order in which write_parameters() visits them.
std::vector<ckpt::ShareEntry> CheckpointSaver::trained_entries() const {
  std::vector<ckpt::ShareEntry> entries;
  for (int b = 0; parts_ != nullptr && b < parts_->layout->num_buckets(); ++b) {
    for (const ShardPiece& piece : parts_->shards->pieces(b)) {
      const std::string& name = parts_->parameters->name(piece.parameter);
      const auto add = [&](const std::string& tensor) {
        entries.push_back({tensor, ckpt::DType::kF32, piece.parameter_offset, piece.parameter_offset + piece.numel});
      };
      add(model_tensor(name));
      for (const auto& state : parts_->pipeline->state_names()) {
        add(state_tensor(state, name));
      }
    }
  }
  return entries;
}

ckpt::Share CheckpointSaver::write_share(const ckpt::SealedFolder& folder, const CheckpointContents& contents,
                                         const Agreed& agreed) {
  std::vector<ckpt::ShareEntry> entries = trained_entries();
  const std::vector<NamedTensor> untrained = own_untrained(contents);
  for (const auto& named : untrained) {
    entries.push_back(
        {model_tensor(named.name), checkpoint_dtype(named.tensor.scalar_type(), named.name), 0, named.tensor.numel()});
  }
  ckpt::ShareWriter writer(folder, ckpt::share_file_name(agreed.save, ranks_.rank(), kShareFile), std::move(entries));
  if (parts_ != nullptr) {
    write_parameters(writer);
  }
  for (const auto& named : untrained) {
    write_tensor(writer, named);
  }
  ckpt::Share extras = write_extras(folder, contents, agreed);
  ckpt::Share share = writer.finish();
  share.append(std::move(extras));
  return share;
}

void CheckpointSaver::write_parameters(ckpt::ShareWriter& writer) {
  std::vector<std::string> names = parts_->pipeline->state_names();
  names.insert(names.begin(), kMasterName);
  std::vector<float> values;
  for (int b = 0; b < parts_->layout->num_buckets(); ++b) {
    if (parts_->shards->pieces(b).empty()) {
      continue;
    }
    BucketStates states(parts_->pipeline->parts(), b, Access::kRead);
    for (const ShardPiece& piece : parts_->shards->pieces(b)) {
      const std::int64_t end = piece.parameter_offset + piece.numel;
      for (const auto& name : names) {
        for (std::int64_t at = piece.parameter_offset; at < end; at = chunk_end(at, end)) {
          values.resize(static_cast<std::size_t>(chunk_end(at, end) - at));
          states.read(piece.parameter, name, at, values);
          writer.write(std::as_bytes(std::span(values)));
        }
      }
    }
  }
}

void CheckpointSaver::write_tensor(ckpt::ShareWriter& writer, const NamedTensor& named) {
  const at::Tensor flat = contiguous(named.tensor);
  const auto width = static_cast<std::size_t>(flat.element_size());
  for (std::int64_t at = 0; at < flat.numel(); at = chunk_end(at, flat.numel())) {
    chunk_.resize(static_cast<std::size_t>(chunk_end(at, flat.numel()) - at) * width);
    bytes_to_host(device_, chunk_.data(), flat, static_cast<std::size_t>(at) * width, chunk_.size());
    writer.write(chunk_);
  }
}

ckpt::Share CheckpointSaver::write_extras(const ckpt::SealedFolder& folder, const CheckpointContents& contents,
                                          const Agreed& agreed) {
  std::vector<NamedTensor> kept = random_states(device_.torch_device());
  for (const auto& [name, bytes] : contents.bytes) {
    kept.push_back({kBytesPrefix + name, bytes});
  }
  for (std::size_t i = 0; i < contents.buffers.size() && ranks_.rank() > 0; ++i) {
    const auto& buffer = contents.buffers[i];
    if (i >= agreed.buffer_sums.size() || sum_of(buffer.tensor) != agreed.buffer_sums[i]) {
      kept.push_back({kBufferPrefix + buffer.name, buffer.tensor});
    }
  }
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ckpt::ExtraTensor> tensors;
  for (const auto& named : kept) {
    const at::Tensor flat = contiguous(named.tensor);
    bytes.emplace_back(flat.nbytes());
    bytes_to_host(device_, bytes.back().data(), flat, 0, flat.nbytes());
    tensors.push_back({{named.name, checkpoint_dtype(flat.scalar_type(), named.name), flat.sizes().vec()}, {}});
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].bytes = bytes[i];
  }
  return write_extra(folder, ckpt::share_file_name(agreed.save, ranks_.rank(), kExtraFile), ranks_.rank(), tensors);
}

ckpt::Manifest CheckpointSaver::manifest_of(const CheckpointContents& contents, ckpt::Share written) const {
  ckpt::Manifest manifest{.step = 0,
                          .world_size = ranks_.world_size(),
                          .attributes = contents.attributes,
                          .tensors = {},
                          .files = std::move(written.files),
                          .shards = std::move(written.shards),
                          .extras = std::move(written.extras)};
  for (int i = 0; parts_ != nullptr && i < parts_->parameters->num_parameters(); ++i) {
    const at::Tensor& parameter = parts_->parameters->parameter(i);
    const std::string& name = parts_->parameters->name(i);
    const auto order = memory_order(parameter.sizes(), parameter.strides());
    const auto shape = in_order(parameter.sizes(), order);
    if (!is_row_major(order)) {
      manifest.attributes["order." + name] = order_text(order);
    }
    manifest.tensors.push_back({model_tensor(name), ckpt::DType::kF32, shape});
    for (const auto& state : parts_->pipeline->state_names()) {
      manifest.tensors.push_back({state_tensor(state, name), ckpt::DType::kF32, shape});
    }
  }
  for (const auto* list : {&contents.frozen, &contents.buffers}) {
    for (const auto& [name, tensor] : *list) {
      manifest.tensors.push_back(
          {model_tensor(name), checkpoint_dtype(tensor.scalar_type(), name), tensor.sizes().vec()});
    }
  }
  for (const auto& buffer : contents.buffers) {
    manifest.attributes["kind." + buffer.name] = "buffer";
  }
  for (const auto& [other, first] : contents.aliases) {
    manifest.attributes["alias." + other] = first;
  }
  if (contents.excludes_frozen) {
    manifest.attributes["excludes_frozen"] = "true";
  }
  return manifest;
}

}  // namespace pannier
