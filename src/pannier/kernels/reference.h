// The maths of every kernel as plain loops. Each line is one IEEE fp32 operation, rounded to nearest even with
// denormals kept; std::fma rounds once; nothing else may be contracted. SIMD and CUDA perform the same operations in
// the same order and give the same bits. NaN is stored as one canonical NaN.
#pragma once

#include <cmath>
#include <cstdint>

#include "pannier/kernels/reference_bits.h"
#include "pannier/kernels/reference_gradient.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels::reference {

/// One parameter element: its fp32 weight and states.
struct Element {
  float weight = 0;
  float state1 = 0;
  float state2 = 0;
};

/// The common end of AdamW and Adam: moments, then the step from `weight`.
inline void adam_step(const UpdateCoefficients& c, float g, float weight, Element& e) {
  e.state1 = std::fma(c.beta1, e.state1, c.one_minus_beta1 * g);
  e.state2 = std::fma(c.beta2, e.state2, (c.one_minus_beta2 * g) * g);
  const float denominator = std::fma(std::sqrt(e.state2), c.inv_sqrt_bias2, c.eps);
  e.weight = std::fma(c.neg_step_size, e.state1 / denominator, weight);
}

inline void adamw(const UpdateCoefficients& c, float g, Element& e) {
  adam_step(c, g, std::fma(c.neg_lr_decay, e.weight, e.weight), e);
}

inline void adam(const UpdateCoefficients& c, float g, Element& e) {
  adam_step(c, std::fma(c.weight_decay, e.weight, g), e.weight, e);
}

inline void sgd(const UpdateCoefficients& c, bool has_momentum, float g, Element& e) {
  g = std::fma(c.weight_decay, e.weight, g);
  float direction = g;
  if (has_momentum) {
    e.state1 = std::fma(c.beta1, e.state1, c.one_minus_beta1 * g);
    direction = c.nesterov ? std::fma(c.beta1, e.state1, g) : e.state1;
  }
  e.weight = std::fma(c.neg_step_size, direction, e.weight);
}

inline void adagrad(const UpdateCoefficients& c, float g, Element& e) {
  g = std::fma(c.weight_decay, e.weight, g);
  e.state1 = std::fma(g, g, e.state1);
  e.weight = std::fma(c.neg_step_size, g / (std::sqrt(e.state1) + c.eps), e.weight);
}

inline void lion(const UpdateCoefficients& c, float g, Element& e) {
  const float interpolated = std::fma(c.beta1, e.state1, c.one_minus_beta1 * g);
  float sign = interpolated;  // Keeps NaN and zero.
  if (interpolated > 0 || interpolated < 0) {
    sign = interpolated > 0 ? 1.0F : -1.0F;
  }
  e.weight = std::fma(c.neg_step_size, sign, std::fma(c.neg_lr_decay, e.weight, e.weight));
  e.state1 = std::fma(c.beta2, e.state1, c.one_minus_beta2 * g);
}

/// Applies one rule to one element; `g` is already multiplied by the gradient factor.
inline void apply(Algorithm algorithm, const UpdateCoefficients& c, bool has_state1, float g, Element& e) {
  switch (algorithm) {
    case Algorithm::kAdamW:
      return adamw(c, g, e);
    case Algorithm::kAdam:
      return adam(c, g, e);
    case Algorithm::kSgd:
      return sgd(c, has_state1, g, e);
    case Algorithm::kAdagrad:
      return adagrad(c, g, e);
    case Algorithm::kLion:
      return lion(c, g, e);
  }
}

inline float load_weight(StateFormat format, const UpdateBuffers& b, std::int64_t i) {
  switch (format) {
    case StateFormat::kFp32:
      return static_cast<const float*>(b.param)[i];
    case StateFormat::kFp16:
      return static_cast<const float*>(b.rest)[i];
    case StateFormat::kBf16:
      return join(static_cast<const std::uint16_t*>(b.param)[i], static_cast<const std::int16_t*>(b.rest)[i]);
  }
  return 0;
}

inline void store_weight(StateFormat format, const UpdateBuffers& b, std::int64_t i, float weight) {
  if (format == StateFormat::kFp32) {
    static_cast<float*>(b.param)[i] = canonical(weight);
  } else if (format == StateFormat::kFp16) {
    static_cast<float*>(b.rest)[i] = canonical(weight);
    static_cast<std::uint16_t*>(b.param)[i] = to_fp16(weight);
  } else {
    const SplitMaster parts = split(weight);
    static_cast<std::uint16_t*>(b.param)[i] = parts.hi;
    static_cast<std::int16_t*>(b.rest)[i] = parts.lo;
  }
}

/// Updates one run of elements.
inline void update(Algorithm algorithm, StateFormat format, const UpdateCoefficients& c, const UpdateBuffers& b) {
  for (std::int64_t i = 0; i < b.numel; ++i) {
    Element e{load_weight(format, b, i), b.state1 != nullptr ? b.state1[i] : 0, b.state2 != nullptr ? b.state2[i] : 0};
    apply(algorithm, c, b.state1 != nullptr, load_gradient(b.grad, b.grad_type, i) * c.grad_factor, e);
    store_weight(format, b, i, e.weight);
    if (b.state1 != nullptr) {
      b.state1[i] = canonical(e.state1);
    }
    if (b.state2 != nullptr) {
      b.state2[i] = canonical(e.state2);
    }
  }
}

}  // namespace pannier::kernels::reference
