#include "pannier/io/checksum.h"

#define XXH_INLINE_ALL  // The header is the library: nothing to link, nothing to pack.
#include <xxhash.h>

#include <algorithm>

namespace pannier {

std::uint64_t tile_checksum(std::span<const std::byte> tile, std::uint64_t tile_index) noexcept {
  return XXH3_64bits_withSeed(tile.data(), tile.size(), tile_index);
}

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  std::uint64_t sum = 0;
  std::uint64_t index = 0;
  for (std::size_t at = 0; at < bytes.size(); at += kChecksumTileBytes) {
    sum += tile_checksum(bytes.subspan(at, std::min(kChecksumTileBytes, bytes.size() - at)), index++);
  }
  return sum;
}

}  // namespace pannier
