#include "pannier/ckpt/checkpoint_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/strict_json.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {

void check_sizes(const SealedFolder& folder, const Manifest& manifest) {
  for (const auto& each : manifest.files) {
    const std::string path = folder.path() + "/" + each.name;
    const OwnedFd fd = folder.open_file(each.name);
    if (const std::uint64_t nbytes = regular_file_nbytes(fd.get(), path); nbytes != each.nbytes) {
      bad_content(path, fmt::format("{} bytes, {} were expected", nbytes, each.nbytes));
    }
  }
}

CheckpointReader::CheckpointReader(SealedFolder folder)
    : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
  check_sizes(folder_, manifest_);
  for (const auto& tensor : manifest_.tensors) {
    tensors_[tensor.name] = &tensor;
  }
  for (const auto& shard : manifest_.shards) {
    shards_[shard.tensor].push_back(&shard);
  }
  for (auto& [name, list] : shards_) {
    std::sort(list.begin(), list.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  }
}

const TensorInfo* CheckpointReader::find(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  return found == tensors_.end() ? nullptr : found->second;
}

std::string CheckpointReader::attribute(const std::string& key, const std::string& otherwise) const {
  const auto found = manifest_.attributes.find(key);
  return found == manifest_.attributes.end() ? otherwise : found->second;
}

void CheckpointReader::read(const std::string& tensor, std::int64_t begin, std::span<std::byte> bytes) {
  const TensorInfo* info = find(tensor);
  const std::size_t width = info == nullptr ? 1 : dtype_nbytes(info->dtype);
  const std::int64_t end = begin + static_cast<std::int64_t>(bytes.size() / width);
  if (info == nullptr || bytes.size() % width != 0 || begin < 0 || end > *info->checked_numel()) {
    throw ConfigError(fmt::format("'{}' has no elements {} to {} of a tensor '{}'", path(), begin, end, tensor));
  }
  if (begin == end) {
    return;
  }
  const auto& list = shards_[tensor];
  auto shard =
      std::upper_bound(list.begin(), list.end(), begin, [](std::int64_t at, const auto* s) { return at < s->end; });
  for (std::int64_t at = begin; at < end; ++shard) {
    const std::int64_t stop = std::min(end, (*shard)->end);
    read_shard(
        **shard, *info, at,
        bytes.subspan(static_cast<std::size_t>(at - begin) * width, static_cast<std::size_t>(stop - at) * width));
    at = stop;
  }
}

const SafetensorsReader& CheckpointReader::reader_of(const ManifestShard& shard, const TensorInfo& info) {
  auto& reader = readers_[shard.file];
  if (reader == nullptr) {
    reader = std::make_unique<SafetensorsReader>(folder_, shard.file);
  }
  const auto* const entry = reader->find(shard.key);
  if (entry == nullptr || entry->info.dtype != info.dtype || entry->numel != shard.end - shard.begin) {
    bad_content(path() + "/" + shard.file, fmt::format("{} {} elements were expected as '{}'", shard.end - shard.begin,
                                                       dtype_name(info.dtype), shard.key));
  }
  return *reader;
}

std::uint64_t CheckpointReader::file_offset(const ManifestShard& shard, std::int64_t element) {
  const TensorInfo& info = *tensors_.at(shard.tensor);
  const SafetensorsReader& reader = reader_of(shard, info);
  return reader.offset_of(*reader.find(shard.key), element - shard.begin);
}

// Whole chunks go to where they are wanted; of those at the ends, all is read and a part is given.
void CheckpointReader::read_shard(const ManifestShard& shard, const TensorInfo& info, std::int64_t begin,
                                  std::span<std::byte> bytes) {
  const SafetensorsReader& reader = reader_of(shard, info);
  const std::size_t width = dtype_nbytes(info.dtype);
  const std::int64_t end = begin + static_cast<std::int64_t>(bytes.size() / width);
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t chunk = at / kChunkElements;
    const std::int64_t first = std::max(shard.begin, chunk * kChunkElements);
    const std::int64_t last = chunk_end(first, shard.end);
    const std::int64_t stop = std::min(last, end);
    const auto wanted =
        bytes.subspan(static_cast<std::size_t>(at - begin) * width, static_cast<std::size_t>(stop - at) * width);
    const bool whole = at == first && stop == last;
    chunk_.resize(whole ? 0 : static_cast<std::size_t>(last - first) * width);
    const std::span<std::byte> into = whole ? wanted : std::span(chunk_);
    reader.read(shard.key, first - shard.begin, into);
    const std::uint64_t sum = shard.checksums[static_cast<std::size_t>(chunk - shard.begin / kChunkElements)];
    if (const std::uint64_t found = checksum(into); found != sum) {
      bad_content(path() + "/" + shard.file,
                  fmt::format("tensor '{}', elements {} to {}: checksum {:016x}, {:016x} was expected", shard.tensor,
                              first, last, found, sum));
    }
    if (!whole) {
      std::copy_n(into.begin() + (at - first) * static_cast<std::int64_t>(width), wanted.size(), wanted.begin());
    }
    at = stop;
  }
}

std::unique_ptr<SafetensorsReader> CheckpointReader::extra(int rank) {
  for (const auto& extra : manifest_.extras) {
    if (extra.rank == rank) {
      if (const std::uint64_t found = file_checksum(folder_, extra.file); found != extra.checksum) {
        bad_content(path() + "/" + extra.file,
                    fmt::format("checksum {:016x}, {:016x} was expected", found, extra.checksum));
      }
      return std::make_unique<SafetensorsReader>(folder_, extra.file);
    }
  }
  return nullptr;
}

}  // namespace pannier::ckpt
