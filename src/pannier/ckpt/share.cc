#include "pannier/ckpt/share.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {
namespace {

constexpr std::size_t kDataAlignment = 4096;

std::vector<TensorInfo> flat_tensors(const std::vector<ShareEntry>& entries) {
  std::vector<TensorInfo> tensors;
  for (const auto& entry : entries) {
    tensors.push_back({entry.tensor, entry.dtype, {entry.end - entry.begin}});
  }
  return tensors;
}

template <class T>
void move_to_end(std::vector<T>& to, std::vector<T>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

std::string new_save_name() {
  std::random_device random;
  return fmt::format("{:016x}", (static_cast<std::uint64_t>(random()) << 32) | random());
}

std::string share_file_name(const std::string& save, int rank, std::string_view what) {
  return fmt::format("{}{}-{}-{:05}.safetensors", kFilePrefix, save, what, rank);
}

void Share::append(Share other) {
  move_to_end(files, other.files);
  move_to_end(shards, other.shards);
  move_to_end(extras, other.extras);
}

std::uint64_t file_checksum(const SealedFolder& folder, const std::string& file) {
  const OwnedFd fd = folder.open_file(file);
  const std::string path = folder.path() + "/" + file;
  const std::uint64_t nbytes = regular_file_nbytes(fd.get(), path);
  std::vector<std::byte> tile;
  std::uint64_t sum = 0;
  for (std::uint64_t at = 0; at < nbytes; at += kChecksumTileBytes) {
    tile.resize(std::min<std::uint64_t>(kChecksumTileBytes, nbytes - at));
    read_exactly(fd.get(), tile, at, path);
    sum += tile_checksum(tile, at / kChecksumTileBytes);
  }
  return sum;
}

std::int64_t chunk_end(std::int64_t at, std::int64_t end) noexcept {
  return std::min(end, (at / kChunkElements + 1) * kChunkElements);
}

ShareWriter::ShareWriter(const SealedFolder& folder, std::string file, std::vector<ShareEntry> entries,
                         FileMover* mover)
    : folder_(folder), file_(std::move(file)), entries_(std::move(entries)) {
  std::erase_if(entries_, [](const ShareEntry& entry) { return entry.begin == entry.end; });
  if (!entries_.empty()) {
    writer_ = std::make_unique<SafetensorsWriter>(
        folder_, file_, flat_tensors(entries_),
        SafetensorsWriterOptions{.data_alignment = kDataAlignment, .rename_at_end = false, .mover = mover});
    at_ = entries_.front().begin;
  }
}

ShareWriter::~ShareWriter() = default;

void ShareWriter::write(std::span<const std::byte> elements) {
  while (!elements.empty()) {
    PANNIER_CHECK(next_ < entries_.size(), fmt::format("'{}': elements after the last", file_));
    const ShareEntry& entry = entries_[next_];
    const std::size_t width = dtype_nbytes(entry.dtype);
    const std::int64_t end = chunk_end(at_, entry.end);
    PANNIER_CHECK(elements.size() % width == 0 && elements.size() / width <= static_cast<std::size_t>(entry.end - at_),
                  fmt::format("'{}': {} bytes of '{}' from element {} on", file_, elements.size(), entry.tensor, at_));
    if (at_ == entry.begin) {
      share_.shards.push_back({file_, entry.tensor, entry.tensor, entry.begin, entry.end, {}});
    }
    const auto part = elements.first(std::min(elements.size(), static_cast<std::size_t>(end - at_) * width));
    sum_.update(part);
    writer_->write(next_, at_ - entry.begin, part);
    elements = elements.subspan(part.size());
    at_ += static_cast<std::int64_t>(part.size() / width);
    if (at_ == end) {
      share_.shards.back().checksums.push_back(sum_.take());
    }
    if (at_ == entry.end && ++next_ < entries_.size()) {
      at_ = entries_[next_].begin;
    }
  }
}

Share ShareWriter::finish() {
  if (writer_ != nullptr) {
    writer_->finish();
    share_.files.push_back({file_, writer_->file_nbytes()});
  }
  return std::move(share_);
}

Share write_extra(const SealedFolder& folder, const std::string& file, int rank,
                  const std::vector<ExtraTensor>& tensors) {
  std::vector<TensorInfo> infos;
  for (const auto& tensor : tensors) {
    infos.push_back(tensor.info);
  }
  SafetensorsWriter writer(folder, file, infos, {.metadata = {}, .data_alignment = 8, .rename_at_end = false});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    writer.write(i, 0, tensors[i].bytes);
  }
  writer.finish();
  return {.files = {{file, writer.file_nbytes()}}, .shards = {}, .extras = {{rank, file, file_checksum(folder, file)}}};
}

}  // namespace pannier::ckpt
