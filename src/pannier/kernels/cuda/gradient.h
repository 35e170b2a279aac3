// gradient.h on a GPU: one launch reads the gradients of many runs, and adds what it finds to a result that stays in
// device memory. Block sums are added to the limbs of an ExactSum as integers, so the order in which thread blocks
// finish cannot matter, and ranks may sum the limbs. Calls return at once; the work is done in the stream's order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pannier/kernels/cuda/stream.h"
#include "pannier/kernels/gradient.h"

namespace pannier::kernels::cuda {

/// GradientStats as they lie in device memory; all zero before the first launch. 23 int64 that ranks may sum.
struct DeviceGradientStats {
  std::int64_t limbs[ExactSum::kNumLimbs];
  std::int64_t num_nonfinite;
};

/// The elements of one parameter, from one of its block edges on.
struct GradientRun {
  const void* grad = nullptr;
  std::int64_t numel = 0;
  std::int64_t first_block = 0;  ///< Filled by number_blocks.
};

/// Numbers the blocks of all runs, and returns how many there are.
std::int64_t number_blocks(std::span<GradientRun> runs);

/// Adds the sum of squares and the count of non-finite elements of `num_runs` runs, which lie in device memory with
/// their `num_blocks` blocks numbered, to `stats`; where `nonfinite_by_run` is not null, also each run's count to its
/// entry. All pointers are to device memory.
void gradient_stats(const GradientRun* runs, int num_runs, std::int64_t num_blocks, GradType type,
                    DeviceGradientStats* stats, std::int64_t* nonfinite_by_run, Stream stream);

/// What a copy of the device's result says on the host.
[[nodiscard]] GradientStats to_host_stats(const DeviceGradientStats& stats);

/// sum[i] += grad[i] in fp32 (or sum[i] = grad[i] where `first`), in device memory.
void accumulate(float* sum, const void* grad, GradType type, std::int64_t numel, bool first, Stream stream);

}  // namespace pannier::kernels::cuda
