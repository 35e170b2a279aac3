// The checksum of what rests on disk: 64-bit XXH3 of each tile, seeded with the tile's number, added up. So the tiles
// may be hashed by several threads in any order, each while its bytes are in cache for the update anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace pannier {

/// The bytes hashed at one go: they stay in a core's own cache.
inline constexpr std::size_t kChecksumTileBytes = std::size_t{128} << 10;

/// What tile `tile_index` of an extent adds to its checksum. Every tile but the last has kChecksumTileBytes.
[[nodiscard]] std::uint64_t tile_checksum(std::span<const std::byte> tile, std::uint64_t tile_index) noexcept;

/// The checksum of a whole extent: the sum over its tiles, modulo 2^64.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

/// The same of bytes that come in runs of any size. Move-only.
class ChecksumStream {
 public:
  ChecksumStream();
  ~ChecksumStream();
  ChecksumStream(ChecksumStream&&) noexcept;
  ChecksumStream& operator=(ChecksumStream&&) noexcept;
  ChecksumStream(const ChecksumStream&) = delete;
  ChecksumStream& operator=(const ChecksumStream&) = delete;

  /// The bytes that follow.
  void update(std::span<const std::byte> bytes) noexcept;
  /// The checksum of all that came since the start, or the last call; it starts anew.
  [[nodiscard]] std::uint64_t take() noexcept;

 private:
  struct Tile;
  void end_tile() noexcept;

  std::unique_ptr<Tile> tile_;  ///< What has come of a tile that is not whole.
  std::size_t nbytes_in_tile_ = 0;
  std::uint64_t num_tiles_ = 0;
  std::uint64_t sum_ = 0;
};

}  // namespace pannier
