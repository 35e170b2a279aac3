// Checksums of a store on a disk. A chunk's is the sum over its tiles, so that threads may hash them in any order, and
// an update may hash each while it has it in its cache.
#include <algorithm>
#include <array>
#include <atomic>

#include "pannier/base/units.h"
#include "pannier/io/checksum.h"
#include "pannier/layout/bucket_layout.h"
#include "pannier/tier/nvme_state_store.h"

namespace pannier {
namespace {

// With their gradients some 110 KiB, which stay in a core's own cache.
constexpr std::int64_t kTileNumel = 2 * kBlockNumel;

}  // namespace

std::int64_t NvmeStateStore::tile_numel() const noexcept { return kTileNumel; }

std::uint64_t NvmeStateStore::tile_sum(ChunkId chunk, const std::byte* states, std::int64_t tile) const {
  const StateShape shape = shape_of(chunk.bucket);
  const std::int64_t numel = range(chunk).numel();
  const HostBucketLayout layout = host_bucket_layout(shape, numel);
  const std::array<std::size_t, 4> widths{shape.num_states < 1 ? 0U : 4U, shape.num_states < 2 ? 0U : 4U,
                                          shape.rest_nbytes, shape.param_nbytes};
  const std::int64_t begin = tile * kTileNumel;
  const std::int64_t in_tile = std::min(kTileNumel, numel - begin);
  std::uint64_t sum = 0;
  for (std::size_t array = 0; array < widths.size(); ++array) {
    if (widths[array] > 0) {
      sum += tile_checksum(
          {states + layout.offsets[array] + nbytes_of(begin, widths[array]), nbytes_of(in_tile, widths[array])},
          4 * static_cast<std::uint64_t>(tile) + array);
    }
  }
  return sum;
}

std::uint64_t NvmeStateStore::tile_sum(ChunkId chunk, std::int64_t tile) const {
  const std::size_t extent = extent_of(chunk);
  return slot_of_[extent] < 0
             ? 0
             : tile_sum(chunk, slots_[static_cast<std::size_t>(slot_of_[extent])].buffer.data().data(), tile);
}

// Tiles are hashed by several threads.
std::uint64_t NvmeStateStore::sum_of(ChunkId chunk, const std::byte* states) const {
  std::atomic<std::uint64_t> sum{0};
  parallel_for_((range(chunk).numel() + kTileNumel - 1) / kTileNumel, 4, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t part = 0;
    for (std::int64_t tile = begin; tile < end; ++tile) {
      part += tile_sum(chunk, states, tile);
    }
    sum.fetch_add(part, std::memory_order_relaxed);
  });
  return sum.load();
}

std::uint64_t NvmeStateStore::sum_of(const Slot& slot) const {
  return sum_of(chunk_at_[slot.extent], slot.buffer.data().data());
}

void NvmeStateStore::check(Slot& slot) {
  if (slot.is_checked) {
    return;
  }
  try {
    extents_->verify(slot.extent, sum_of(slot));
  } catch (...) {
    free(slot);
    throw;
  }
  slot.is_checked = true;
}

void NvmeStateStore::confirm(ChunkId chunk, std::uint64_t before, std::uint64_t after) {
  Slot* const slot = slot_with(extent_of(chunk));
  if (slot == nullptr) {
    return;  // It rests in memory.
  }
  if (!slot->is_checked) {
    extents_->verify(slot->extent, before);
  }
  slot->is_checked = true;
  slot->sum = after;
}

}  // namespace pannier
