#include "pannier/io/checksum.h"

#define XXH_INLINE_ALL  // The header is the library: nothing to link, nothing to pack.
#include <xxhash.h>

#include <algorithm>
#include <utility>

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

struct ChecksumStream::Tile {
  XXH3_state_t state;
};

ChecksumStream::ChecksumStream() : tile_(std::make_unique<Tile>()) {}
ChecksumStream::~ChecksumStream() = default;
ChecksumStream::ChecksumStream(ChecksumStream&&) noexcept = default;
ChecksumStream& ChecksumStream::operator=(ChecksumStream&&) noexcept = default;

void ChecksumStream::end_tile() noexcept {
  sum_ += XXH3_64bits_digest(&tile_->state);
  nbytes_in_tile_ = 0;
  ++num_tiles_;
}

void ChecksumStream::update(std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kChecksumTileBytes - nbytes_in_tile_));
    bytes = bytes.subspan(part.size());
    if (part.size() == kChecksumTileBytes) {
      sum_ += tile_checksum(part, num_tiles_++);
      continue;
    }
    if (nbytes_in_tile_ == 0) {
      XXH3_64bits_reset_withSeed(&tile_->state, num_tiles_);
    }
    XXH3_64bits_update(&tile_->state, part.data(), part.size());
    nbytes_in_tile_ += part.size();
    if (nbytes_in_tile_ == kChecksumTileBytes) {
      end_tile();
    }
  }
}

std::uint64_t ChecksumStream::take() noexcept {
  if (nbytes_in_tile_ > 0) {
    end_tile();
  }
  num_tiles_ = 0;
  return std::exchange(sum_, 0);
}

}  // namespace pannier
