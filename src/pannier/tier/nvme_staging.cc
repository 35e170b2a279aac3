#include "pannier/tier/nvme_staging.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/io/extent_table.h"
#include "pannier/layout/bucket_layout.h"

namespace pannier {
namespace {

constexpr std::size_t kMostChunkBytes = std::size_t{8} << 20;

}  // namespace

std::size_t bytes_per_element(const StateShape& shape) {
  return shape.param_nbytes + shape.rest_nbytes + 4 * static_cast<std::size_t>(shape.num_states);
}

NvmeStaging nvme_staging(const StateShape& shape, const std::vector<std::int64_t>& bucket_numels,
                         const NvmeStateOptions& options) {
  const std::size_t width = bytes_per_element(shape);
  const std::size_t most = std::min(options.buffer_nbytes / 2, kMostChunkBytes);
  NvmeStaging staging;
  staging.chunk_numel = static_cast<std::int64_t>(most / width) / kBlockNumel * kBlockNumel;
  if (staging.chunk_numel < kBlockNumel) {
    throw ConfigError(fmt::format("{}: {} bytes are too few, a buffer must hold at least {}", options.buffer_key,
                                  options.buffer_nbytes, 2 * nbytes_of(kBlockNumel, width)));
  }
  staging.chunk_nbytes = padded_bytes(nbytes_of(staging.chunk_numel, width));
  std::size_t num_chunks = 0;
  std::size_t nbytes = 0;
  staging.host_chunks = options.host_nbytes / staging.chunk_nbytes;
  for (auto numel = bucket_numels.rbegin(); numel != bucket_numels.rend(); ++numel) {
    for (std::int64_t at = 0; at < *numel; at += staging.chunk_numel, ++num_chunks) {
      const bool is_on_disk = num_chunks >= staging.host_chunks;
      nbytes += is_on_disk ? padded_bytes(nbytes_of(std::min(staging.chunk_numel, *numel - at), width)) : 0;
    }
  }
  staging.host_chunks = std::min(staging.host_chunks, num_chunks);
  const std::size_t most_buffers = options.buffer_count * options.buffer_nbytes / staging.chunk_nbytes;
  staging.num_buffers = std::clamp<std::size_t>(num_chunks - staging.host_chunks, 1, most_buffers);
  staging.file_nbytes = std::max(nbytes, kIoAlignment);
  return staging;
}

}  // namespace pannier
