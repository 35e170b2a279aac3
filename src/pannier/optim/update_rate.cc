#include "pannier/optim/update_rate.h"

#include <algorithm>
#include <chrono>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/state_shape.h"
#include "pannier/mem/host_slab.h"

namespace pannier {
namespace {

// Fewer parameters measure caches, not memory.
constexpr std::int64_t kLeastNumel = std::int64_t{1} << 20;
constexpr int kMostUpdates = 8;
constexpr StateShape kShape{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};

double measure(const ParallelFor& parallel_for, std::int64_t numel, double most_seconds) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const HostBucketLayout layout = host_bucket_layout(kShape, numel);
  HostMemory memory;
  HostSlab slab(memory, layout.nbytes + nbytes_of(numel, 2), {.owner = "rate probe"}, parallel_for);
  std::byte* base = slab.data().data();
  const kernels::UpdateBuffers buffers{.param = base + layout.offsets[3],
                                       .rest = base + layout.offsets[2],
                                       .state1 = reinterpret_cast<float*>(base + layout.offsets[0]),
                                       .state2 = reinterpret_cast<float*>(base + layout.offsets[1]),
                                       .grad = base + layout.nbytes,
                                       .grad_type = kernels::GradType::kBf16,
                                       .numel = numel};
  const kernels::Hyperparameters hyper;
  double best = 0.0;
  for (int i = 0; i < kMostUpdates && (i < 2 || seconds_since(begin) < most_seconds); ++i) {
    const auto coefficients = kernels::make_coefficients(kernels::Algorithm::kAdamW, hyper, i + 1, 1.0F);
    const auto start = std::chrono::steady_clock::now();
    kernels::update_all(kernels::Algorithm::kAdamW, kernels::StateFormat::kBf16, {{coefficients, buffers}},
                        parallel_for);
    const double seconds = std::max(seconds_since(start), 1e-9);
    if (i > 0) {  // The first wakes the threads.
      best = std::max(best, static_cast<double>(numel) / seconds);
    }
  }
  return best;
}

}  // namespace

double measure_update_rate(const ParallelFor& parallel_for, const UpdateRateOptions& options) {
  const std::int64_t least = std::min(kLeastNumel, options.numel);
  for (std::int64_t numel = options.numel; numel >= least && numel > 0; numel /= 2) {
    try {
      return measure(parallel_for, numel, options.most_seconds);
    } catch (const OutOfMemoryError&) {
      continue;  // A smaller measurement is better than none.
    }
  }
  return 0.0;
}

}  // namespace pannier
