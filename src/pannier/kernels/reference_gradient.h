// The maths of the passes over gradients as plain loops: see reference.h.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "pannier/kernels/reference_bits.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels::reference {

inline float load_gradient(const void* grad, GradType type, std::int64_t i) {
  if (type == GradType::kFp32) {
    return static_cast<const float*>(grad)[i];
  }
  const std::uint16_t bits = static_cast<const std::uint16_t*>(grad)[i];
  return type == GradType::kFp16 ? from_fp16(bits) : from_bf16(bits);
}

/// The fixed tree that ends a block's sum of squares: 32 lanes combined by halves.
inline double combine_lanes(std::array<double, 32>& lanes) {
  for (std::size_t half = 16; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

/// The sum of squares of one block of at most kBlockNumel elements. It is finite exactly where every element is.
inline double block_sum(const void* grad, GradType type, std::int64_t numel) {
  std::array<double, 32> lanes{};
  for (std::int64_t i = 0; i < numel; ++i) {
    const double x = load_gradient(grad, type, i);
    auto& lane = lanes[static_cast<std::size_t>(i % 32)];
    lane = std::fma(x, x, lane);
  }
  return combine_lanes(lanes);
}

/// sum[i] += grad[i], or sum[i] = grad[i] where `first`.
inline void accumulate(float* sum, const void* grad, GradType type, std::int64_t numel, bool first) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const float g = load_gradient(grad, type, i);
    sum[i] = canonical(first ? g : sum[i] + g);
  }
}

}  // namespace pannier::kernels::reference
