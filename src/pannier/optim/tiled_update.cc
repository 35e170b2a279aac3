#include "pannier/optim/tiled_update.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "pannier/device/compute.h"

namespace pannier {
namespace {

// Tiles that a thread takes at a time: a megabyte of states, as kernels::update_all has it.
constexpr std::int64_t kGrainTiles = 4;

// Where each task's elements begin in the chunk.
std::vector<std::int64_t> offsets_in(const StateView& view, const std::vector<kernels::UpdateTask>& tasks,
                                     kernels::StateFormat format) {
  const std::ptrdiff_t width = format == kernels::StateFormat::kFp32 ? 4 : 2;
  std::vector<std::int64_t> offsets;
  for (const kernels::UpdateTask& task : tasks) {
    offsets.push_back((static_cast<const std::byte*>(task.buffers.param) - static_cast<const std::byte*>(view.param)) /
                      width);
  }
  return offsets;
}

}  // namespace

std::uint64_t update_in_tiles(StateStore& states, const Lease& lease, const std::vector<kernels::UpdateTask>& tasks,
                              float grad_factor, const TiledUpdateOptions& options) {
  const std::int64_t numel = lease.view().range.numel();
  const std::int64_t tile_numel = states.tile_numel();
  const std::vector<std::int64_t> offsets = offsets_in(lease.view(), tasks, options.format);
  const auto update = [&](std::int64_t from, std::int64_t to) {
    auto index = static_cast<std::size_t>(std::upper_bound(offsets.begin(), offsets.end(), from) - offsets.begin());
    for (index = index == 0 ? 0 : index - 1; index < tasks.size() && offsets[index] < to; ++index) {
      const kernels::UpdateBuffers& buffers = tasks[index].buffers;
      const std::int64_t begin = std::max<std::int64_t>(from - offsets[index], 0);
      const std::int64_t end = std::min(to - offsets[index], buffers.numel);
      if (begin < end) {
        kernels::UpdateCoefficients coefficients = tasks[index].coefficients;
        coefficients.grad_factor = grad_factor;
        kernels::update(options.algorithm, options.format, coefficients,
                        kernels::slice(options.format, buffers, begin, end - begin));
      }
    }
  };
  std::atomic<std::uint64_t> before{0};
  std::atomic<std::uint64_t> after{0};
  const std::int64_t num_tiles = (numel + tile_numel - 1) / tile_numel;
  torch_parallel_for(options.most_threads)(num_tiles, kGrainTiles, [&](std::int64_t first, std::int64_t last) {
    std::uint64_t sum_before = 0;
    std::uint64_t sum_after = 0;
    for (std::int64_t tile = first; tile < last; ++tile) {
      sum_before += states.tile_sum(lease.chunk(), tile);
      update(tile * tile_numel, std::min((tile + 1) * tile_numel, numel));
      sum_after += states.tile_sum(lease.chunk(), tile);
    }
    before += sum_before;
    after += sum_after;
  });
  states.confirm(lease.chunk(), before, after);
  return after;
}

}  // namespace pannier
