// The checksum of what rests on disk: 64-bit XXH3 of each tile, seeded with the tile's number, added up. So the tiles
// may be hashed by several threads in any order, each while its bytes are in cache for the update anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pannier {

/// The bytes hashed at one go: they stay in a core's own cache.
inline constexpr std::size_t kChecksumTileBytes = std::size_t{128} << 10;

/// What tile `tile_index` of an extent adds to its checksum. Every tile but the last has kChecksumTileBytes.
[[nodiscard]] std::uint64_t tile_checksum(std::span<const std::byte> tile, std::uint64_t tile_index) noexcept;

/// The checksum of a whole extent: the sum over its tiles, modulo 2^64.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

}  // namespace pannier
