// Passes over gradients: the global norm, whether any element is not finite, and accumulation in fp32.
//
// The norm must not depend on buckets, ranks, threads or processor. Each parameter is cut into blocks of kBlockNumel
// from its own start; the squares of a block are summed in fp64 by one fixed tree (32 lanes, element i in lane i mod
// 32, added in order with fma; lanes combined by halves: 16, 8, 4, 2, 1), and block sums are added in ExactSum, where
// order cannot matter.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pannier/base/parallel.h"
#include "pannier/kernels/exact_sum.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/bucket_layout.h"

namespace pannier::kernels {

/// What one pass over a gradient tells.
struct GradientStats {
  ExactSum sum_of_squares;         ///< Of the finite block sums.
  std::int64_t num_nonfinite = 0;  ///< Elements that are NaN or infinite.
};

/// Reads `numel` elements of one parameter, starting at one of its block edges. Threads never change the result.
[[nodiscard]] GradientStats gradient_stats(const void* grad, GradType type, std::int64_t numel,
                                           const ParallelFor& parallel, const std::string& target = {});

/// sum[i] += grad[i] in fp32 (or sum[i] = grad[i] where `first`).
void accumulate(float* sum, const void* grad, GradType type, std::int64_t numel, bool first,
                const ParallelFor& parallel, const std::string& target = {});

}  // namespace pannier::kernels
