// The one decision of a step: from the gradients' sum of squares and count of non-finite elements to the factor that
// the update multiplies gradients with, or to a skip. cuda/decision.h makes the same decision on a GPU, where the
// update reads it from device memory; both round the same expressions once.
#pragma once

#include <cstdint>

#include "pannier/kernels/gradient.h"

namespace pannier::kernels {

/// What is known before the gradients are.
struct DecisionInputs {
  double scale = 1;  ///< What the gradients are multiplied with; the update divides by it.
  double clip = 0;   ///< Greatest norm; 0 does not clip.
  bool skips_nonfinite = true;
};

/// What was decided.
struct Decision {
  double sum_of_squares;  ///< ExactSum::value, of gradients as they are, scaled.
  double norm;            ///< Of the unscaled gradients; infinite where an element is not finite.
  std::int64_t num_nonfinite;
  float grad_factor;
  std::uint32_t skip;
};

/// Decides: the norm is sqrt(sum) / scale, the factor clip / (norm + 1e-6) / scale where the norm is above clip (the
/// coefficient of torch.nn.utils.clip_grad_norm_), else 1 / scale. A norm that is not finite does not clip.
[[nodiscard]] Decision decide(const GradientStats& stats, const DecisionInputs& inputs) noexcept;

}  // namespace pannier::kernels
