#include "pannier/engine/checkpoint_loader.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/ckpt/share.h"
#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/random_states.h"
#include "pannier/engine/shared_outcome.h"
#include "pannier/optim/bucket_states.h"

namespace pannier {
namespace {

using ckpt::chunk_end;

constexpr std::size_t kMostNames = 8;

std::string some_of(const std::vector<std::string>& names) {
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMostNames)));
  return fmt::format("{}{}", fmt::join(first, ", "),
                     names.size() > kMostNames ? fmt::format(" and {} more", names.size() - kMostNames) : "");
}

std::vector<std::int64_t> out_of_order(const std::vector<std::int64_t>& stored,
                                       const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> sizes(stored.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    sizes[static_cast<std::size_t>(order[i])] = stored[i];
  }
  return sizes;
}

}  // namespace

StoredValues::StoredValues(ckpt::CheckpointReader& reader, std::string tensor, const std::string& stored_order,
                           at::IntArrayRef sizes, const std::vector<std::int64_t>& order)
    : reader_(reader), tensor_(std::move(tensor)) {
  const ckpt::TensorInfo& info = *reader.find(tensor_);
  type_ = torch_dtype(info.dtype);
  const auto from = order_from(stored_order, info.shape.size());
  if (const auto stored = out_of_order(info.shape, from); at::IntArrayRef(stored) != sizes) {
    throw ConfigError(
        fmt::format("'{}': tensor '{}' has shape {}, the model's has {}", reader.path(), tensor_, stored, sizes.vec()));
  }
  if (from != order) {
    turn(from, sizes, order);
  }
}

void StoredValues::read(std::int64_t begin, std::span<float> values) {
  if (!turned_.empty()) {
    std::copy_n(turned_.begin() + begin, values.size(), values.begin());
    return;
  }
  if (type_ == at::kFloat) {
    reader_.read(tensor_, begin, std::as_writable_bytes(values));
    return;
  }
  bytes_.resize(values.size() * c10::elementSize(type_));
  reader_.read(tensor_, begin, bytes_);
  const auto numel = static_cast<std::int64_t>(values.size());
  at::from_blob(values.data(), {numel}, at::kFloat).copy_(at::from_blob(bytes_.data(), {numel}, type_));
}

// Rare: somebody has transposed the parameter since, so that ranges of its memory are no ranges of the file's.
void StoredValues::turn(const std::vector<std::int64_t>& from, at::IntArrayRef sizes,
                        const std::vector<std::int64_t>& to) {
  const auto stored = in_order(sizes, from);
  std::vector<float> all(static_cast<std::size_t>(c10::multiply_integers(stored)));
  read(0, all);
  const at::Tensor as_stored = at::from_blob(all.data(), stored, at::kFloat);
  std::vector<std::int64_t> dimension_in_file(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    dimension_in_file[static_cast<std::size_t>(from[i])] = static_cast<std::int64_t>(i);
  }
  const at::Tensor wanted = as_stored.permute(dimension_in_file).permute(to);
  turned_.resize(all.size());
  at::from_blob(turned_.data(), wanted.sizes(), at::kFloat).copy_(wanted);
}

std::string CheckpointLoader::tag_of(const LoadRequest& request) const {
  if (!request.tag.empty()) {
    return request.tag;
  }
  return ckpt::CheckpointFolder(request.folder).latest().value_or("");
}

std::optional<LoadedCheckpoint> CheckpointLoader::open(const LoadRequest& request) {
  LoadedCheckpoint loaded;
  const std::vector<std::string> seen = done_by_all(ranks_, "the names of a checkpoint", [&] {
    const std::string tag = tag_of(request);
    if (tag.empty()) {
      return std::string();
    }
    reader_ = std::make_unique<ckpt::CheckpointReader>(ckpt::SealedFolder(request.folder).folder(tag));
    loaded.path = reader_->path();
    loaded.attributes = reader_->manifest().attributes;
    loaded.world_size = reader_->manifest().world_size;
    compare_names(request, loaded);
    if (wants_states(request)) {
      compare_states(request, loaded);
    }
    return fmt::format("tag '{}' of step {} with {} tensors in {} files", tag, reader_->manifest().step,
                       reader_->manifest().tensors.size(), reader_->manifest().files.size());
  });
  for (std::size_t rank = 1; rank < seen.size(); ++rank) {
    if (seen[rank] != seen[0]) {
      throw ConfigError(fmt::format("load_checkpoint('{}'): rank {} sees {}, rank 0 {}", request.folder, rank,
                                    seen[rank].empty() ? "no latest" : seen[rank],
                                    seen[0].empty() ? "no latest" : seen[0]));
    }
  }
  return reader_ == nullptr ? std::nullopt : std::optional(std::move(loaded));
}

bool CheckpointLoader::wants_states(const LoadRequest& request) const {
  return parts_ != nullptr && request.optimizer_states && !request.module_only;
}

// A tied tensor is stored under one of its names.
std::string CheckpointLoader::stored_name(const std::string& name) const {
  return reader_->find(model_tensor(name)) != nullptr ? name : reader_->attribute("alias." + name, name);
}

void CheckpointLoader::compare_names(const LoadRequest& request, LoadedCheckpoint& loaded) {
  std::set<std::string> used;
  const auto look_for = [&](const std::string& name) {
    const std::string tensor = model_tensor(stored_name(name));
    if (reader_->find(tensor) == nullptr) {
      loaded.missing.push_back(name);
      return false;
    }
    used.insert(tensor);
    return true;
  };
  for (int i = 0; parts_ != nullptr && i < parts_->parameters->num_parameters(); ++i) {
    if (const std::string& name = parts_->parameters->name(i); look_for(name) && request.parameters) {
      (void)values_of(model_tensor(stored_name(name)), stored_name(name), i);
    }
  }
  const bool expects_frozen = reader_->attribute("excludes_frozen").empty();
  for (const auto& named : request.frozen) {
    if (!look_for(named.name) && !expects_frozen) {
      loaded.missing.pop_back();
    }
  }
  for (const auto& named : request.buffers) {
    (void)look_for(named.name);
  }
  for (const auto& tensor : reader_->manifest().tensors) {
    if (tensor.name.starts_with(kModelPrefix) && !used.contains(tensor.name)) {
      loaded.unexpected.push_back(tensor.name.substr(std::string_view(kModelPrefix).size()));
    }
  }
  if (request.strict && !(loaded.missing.empty() && loaded.unexpected.empty())) {
    throw ConfigError(fmt::format(
        "'{}' is of another model:{}{}; load_module_strict=False loads what both have", reader_->path(),
        loaded.missing.empty() ? "" : fmt::format(" it has no {}", some_of(loaded.missing)),
        loaded.unexpected.empty()
            ? ""
            : fmt::format("{} this model has no {}", loaded.missing.empty() ? "" : ";", some_of(loaded.unexpected))));
  }
}

void CheckpointLoader::compare_states(const LoadRequest& request, LoadedCheckpoint& loaded) {
  for (int i = 0; i < parts_->parameters->num_parameters(); ++i) {
    const std::string name = stored_name(parts_->parameters->name(i));
    for (const auto& state : parts_->pipeline->state_names()) {
      const std::string tensor = state_tensor(state, name);
      if (reader_->find(tensor) == nullptr) {
        loaded.missing_states.push_back(fmt::format("{} of {}", state, parts_->parameters->name(i)));
      } else {
        (void)values_of(tensor, name, i);
      }
    }
  }
  if (request.strict && !loaded.missing_states.empty()) {
    throw ConfigError(
        fmt::format("'{}' has no {}, which this optimizer keeps; load_optimizer_states=False loads the rest, "
                    "load_module_strict=False starts what is missing anew",
                    reader_->path(), some_of(loaded.missing_states)));
  }
}

StoredValues CheckpointLoader::values_of(const std::string& tensor, const std::string& name, int parameter) {
  const at::Tensor& owner = parts_->parameters->parameter(parameter);
  return {*reader_, tensor, reader_->attribute("order." + name), owner.sizes(),
          memory_order(owner.sizes(), owner.strides())};
}

void CheckpointLoader::load(const LoadRequest& request, LoadedCheckpoint& loaded) {
  const c10::NoGradGuard no_grad;
  (void)done_by_all(ranks_, "the reading of a checkpoint", [&] {
    if (parts_ != nullptr) {
      load_parameters(request);
    }
    for (const auto* list : {&request.frozen, &request.buffers}) {
      for (const auto& named : *list) {
        load_tensor(named);
      }
    }
    load_extras(request, loaded);
    return std::string();
  });
  if (parts_ != nullptr) {
    parts_->pipeline->publish_loaded();
  }
}

void CheckpointLoader::load_parameters(const LoadRequest& request) {
  for (int b = 0; b < parts_->layout->num_buckets(); ++b) {
    if (parts_->shards->pieces(b).empty()) {
      continue;
    }
    BucketStates states(parts_->pipeline->parts(), b, Access::kUpdate);
    for (const ShardPiece& piece : parts_->shards->pieces(b)) {
      const std::string name = stored_name(parts_->parameters->name(piece.parameter));
      if (request.parameters && reader_->find(model_tensor(name)) != nullptr) {
        load_piece(states, piece, kMasterName, model_tensor(name));
      }
      for (const auto& state : parts_->pipeline->state_names()) {
        if (wants_states(request)) {
          load_piece(states, piece, state, state_tensor(state, name));
        }
      }
    }
    states.close();
  }
}

// What is not there starts anew.
float CheckpointLoader::initial_value(const std::string& state) const {
  return state == parts_->pipeline->state_names().front() ? static_cast<float>(parts_->pipeline->parts().initial_state1)
                                                          : 0.0F;
}

void CheckpointLoader::load_piece(BucketStates& states, const ShardPiece& piece, const std::string& name,
                                  const std::string& tensor) {
  std::optional<StoredValues> stored;
  if (reader_->find(tensor) != nullptr) {
    stored.emplace(values_of(tensor, stored_name(parts_->parameters->name(piece.parameter)), piece.parameter));
  }
  const std::int64_t end = piece.parameter_offset + piece.numel;
  std::vector<float> values;
  for (std::int64_t at = piece.parameter_offset; at < end; at = chunk_end(at, end)) {
    values.assign(static_cast<std::size_t>(chunk_end(at, end) - at), stored ? 0.0F : initial_value(name));
    if (stored) {
      stored->read(at, values);
    }
    states.write(piece.parameter, name, at, values);
  }
}

void CheckpointLoader::load_tensor(const NamedTensor& named) {
  const std::string name = stored_name(named.name);
  const std::string tensor = model_tensor(name);
  const ckpt::TensorInfo* info = reader_->find(tensor);
  if (info == nullptr) {
    return;
  }
  const auto order = order_from(reader_->attribute("order." + name), info->shape.size());
  const auto sizes = out_of_order(info->shape, order);
  if (at::IntArrayRef(sizes) != named.tensor.sizes()) {
    throw ConfigError(fmt::format("'{}': '{}' has shape {}, the model's has {}", reader_->path(), named.name, sizes,
                                  named.tensor.sizes().vec()));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(*info->checked_numel()) * dtype_nbytes(info->dtype));
  reader_->read(tensor, 0, bytes);
  std::vector<std::int64_t> dimension_in_file(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    dimension_in_file[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  const at::Tensor stored = at::from_blob(bytes.data(), info->shape, torch_dtype(info->dtype));
  at::Tensor(named.tensor).detach().copy_(stored.permute(dimension_in_file));
}

void CheckpointLoader::load_extras(const LoadRequest& request, LoadedCheckpoint& loaded) {
  const auto bytes_of = [](const ckpt::SafetensorsReader& extra) {
    NamedBytes bytes;
    for (const auto& entry : extra.entries()) {
      if (entry.info.name.starts_with(kBytesPrefix)) {
        bytes[entry.info.name.substr(std::string_view(kBytesPrefix).size())] = read_extra(extra, entry);
      }
    }
    return bytes;
  };
  if (const auto first = reader_->extra(0); first != nullptr) {
    loaded.common = bytes_of(*first);
  }
  // With another number of ranks there is no telling whose are whose.
  const auto own = loaded.world_size == ranks_.world_size() ? reader_->extra(ranks_.rank()) : nullptr;
  if (own == nullptr) {
    return;
  }
  loaded.own = bytes_of(*own);
  for (const auto& buffer : request.buffers) {
    if (const auto* entry = own->find(kBufferPrefix + buffer.name); entry != nullptr) {
      at::Tensor(buffer.tensor).copy_(read_extra(*own, *entry));
    }
  }
  if (!request.module_only) {
    restore_random_states(*own, device_.torch_device());
  }
}

}  // namespace pannier
