#include "pannier/engine/rank_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/engine/checkpoint_tensors.h"

namespace pannier {
namespace {

constexpr const char* kModelFile = "rank";
constexpr const char* kExtraFile = "extra";
constexpr std::size_t kPartNbytes = std::size_t{1} << 20;

std::vector<ckpt::ShareEntry> model_entries(const Parts* parts, const StateSnapshot* snapshot,
                                            const FrozenPieces* pieces, const SavedContents& contents) {
  std::vector<ckpt::ShareEntry> entries;
  for (const ShardPiece& piece : snapshot == nullptr ? std::vector<ShardPiece>() : snapshot->pieces()) {
    entries.push_back({model_tensor(parts->parameters->name(piece.parameter)), ckpt::DType::kF32,
                       piece.parameter_offset, piece.parameter_offset + piece.numel});
  }
  for (const ckpt::ShareEntry& entry : pieces == nullptr ? std::vector<ckpt::ShareEntry>() : pieces->entries()) {
    entries.push_back(entry);
  }
  for (const auto& [name, tensor] : contents.frozen) {
    entries.push_back({model_tensor(name), checkpoint_dtype(tensor.scalar_type(), name), 0, tensor.numel()});
  }
  for (const TensorCopy& buffer : contents.buffers) {
    entries.push_back({buffer.info.name, buffer.info.dtype, 0, *buffer.info.checked_numel()});
  }
  return entries;
}

std::vector<ckpt::ShareEntry> state_entries(const Parts& parts, const StateSnapshot& snapshot,
                                            const std::string& state) {
  std::vector<ckpt::ShareEntry> entries;
  for (const ShardPiece& piece : snapshot.pieces()) {
    entries.push_back({state_tensor(state, parts.parameters->name(piece.parameter)), ckpt::DType::kF32,
                       piece.parameter_offset, piece.parameter_offset + piece.numel});
  }
  return entries;
}

void write_frozen(ckpt::ShareWriter& writer, Device& device, const SavedContents& contents) {
  std::vector<std::byte> part;
  for (std::size_t i = 0; i < contents.frozen.size(); ++i) {
    const auto& [name, tensor] = contents.frozen[i];
    const auto* const data = static_cast<const std::byte*>(tensor.data_ptr());
    for (std::size_t at = 0; at < tensor.nbytes(); at += kPartNbytes) {
      const std::size_t nbytes = std::min(kPartNbytes, tensor.nbytes() - at);
      if (tensor.is_cpu()) {
        writer.write({data + at, nbytes});
      } else {
        part.resize(nbytes);
        device.copy_down(part.data(), data + at, nbytes);
        writer.write(part);
      }
    }
    if (tensor._version() != contents.versions[i]) {
      throw ConfigError(fmt::format(
          "parameter {} was written into while a checkpoint was being written, so there is none of that save", name));
    }
  }
}

ckpt::Share write_extras(const RankFilesPlace& place, const SavedContents& contents) {
  std::vector<ckpt::ExtraTensor> tensors;
  for (const TensorCopy& copy : contents.extras) {
    tensors.push_back({copy.info, copy.bytes});
  }
  return write_extra(place.folder, ckpt::share_file_name(place.save, place.rank, kExtraFile), place.rank, tensors);
}

}  // namespace

ckpt::Share write_rank_files(const RankFilesPlace& place, ckpt::FileMover& mover, Device& device, const Parts* parts,
                             StateSnapshot* snapshot, FrozenPieces* pieces, const SavedContents& contents) {
  std::vector<std::unique_ptr<ckpt::ShareWriter>> writers;
  const auto open = [&](const std::string& what, std::vector<ckpt::ShareEntry> entries) {
    writers.push_back(std::make_unique<ckpt::ShareWriter>(
        place.folder, ckpt::share_file_name(place.save, place.rank, what), std::move(entries), &mover));
  };
  open(kModelFile, model_entries(parts, snapshot, pieces, contents));
  ckpt::ShareWriter& model = *writers.front();
  if (snapshot != nullptr) {
    for (const auto& state : parts->pipeline->state_names()) {
      open(state, state_entries(*parts, *snapshot, state));
    }
    snapshot->visit([&](const SnapshotRun& run) {
      model.write(std::as_bytes(run.master));
      for (std::size_t i = 1; i < writers.size(); ++i) {
        writers[i]->write(std::as_bytes(run.states.at(i - 1)));
      }
    });
  }
  if (pieces != nullptr) {
    pieces->visit([&](std::span<const std::byte> bytes) { model.write(bytes); });
  }
  write_frozen(model, device, contents);
  for (const TensorCopy& buffer : contents.buffers) {
    model.write(buffer.bytes);
  }
  ckpt::Share share = write_extras(place, contents);
  for (const auto& writer : writers) {
    share.append(writer->finish());
  }
  return share;
}

void remove_rank_files(const RankFilesPlace& place) noexcept {
  try {
    const std::string begin = fmt::format("{}{}-", ckpt::kFilePrefix, place.save);
    const std::string end = ckpt::share_file_name("", place.rank, "").substr(ckpt::kFilePrefix.size() + 1);
    for (const std::string& name : place.folder.names()) {
      if (name.starts_with(begin) && name.ends_with(end)) {
        place.folder.remove(name);
      }
    }
  } catch (const std::exception& error) {
    log::warning(fmt::format("files of a save that failed stay: {}", error.what()));
  }
}

std::uint64_t rank_files_nbytes(const Parts& parts) {
  return nbytes_of(parts.shards->numel(), sizeof(float)) * (1 + parts.pipeline->state_names().size());
}

}  // namespace pannier
