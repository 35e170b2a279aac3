// How fast this machine's cores update parameters that rest in host memory, measured on buffers as the host tier lays
// them out. It stands here, not in hardware/, because it needs the kernels and the slabs.
#pragma once

#include <cstdint>

#include "pannier/base/parallel.h"

namespace pannier {

/// How to measure.
struct UpdateRateOptions {
  double most_seconds = 0.5;                    ///< The buffers' setting up included, but for a first update.
  std::int64_t numel = std::int64_t{16} << 20;  ///< Well above the caches; less is taken where memory is short.
};

/// Parameters per second of AdamW in bf16 on the threads of `parallel_for`: the best of a few updates. 0 where memory
/// does not suffice.
[[nodiscard]] double measure_update_rate(const ParallelFor& parallel_for, const UpdateRateOptions& options = {});

}  // namespace pannier
