// What a store lends: which elements, and where their state can be read and written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "pannier/layout/state_shape.h"

namespace pannier {

/// A run of a shard's elements.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t numel() const noexcept { return end - begin; }
};

/// What two ranges share; empty where that is nothing.
[[nodiscard]] inline ElementRange common(const ElementRange& a, const ElementRange& b) noexcept {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// One chunk of one bucket's shard.
struct ChunkId {
  int bucket = 0;
  int chunk = 0;
  bool operator==(const ChunkId&) const = default;
};

/// What a lease is for.
enum class Access : std::uint8_t {
  kRead,       ///< What is there stays as it is.
  kUpdate,     ///< Any of it may be written.
  kOverwrite,  ///< All of it will be written: what was there need not come.
  kTiles,      ///< As kUpdate, by who gives the store the sums of its tiles (StateStore::confirm) before he uses it.
};

/// Addresses of one chunk's state, each an array over the elements of `range`; null where the format has none.
struct StateView {
  ElementRange range;  ///< Of the shard.
  void* param =
      nullptr;           ///< The parameter as the update reads and writes it: on the device itself, or the host's copy.
  void* rest = nullptr;  ///< The fp32 master of fp16, or `lo` of bf16.
  float* state1 = nullptr;
  float* state2 = nullptr;
};

/// The view of the elements `range` of a shard whose states lie at `states` as `layout`, made for so many elements,
/// says.
[[nodiscard]] StateView view_of(const StateShape& shape, const HostBucketLayout& layout, ElementRange range,
                                std::byte* states, void* param);

}  // namespace pannier
