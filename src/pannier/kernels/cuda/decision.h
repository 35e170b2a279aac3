// The one decision of a step, made on the device: from the gradients' sum and count to the factor that the update
// multiplies gradients with, or to a skip. The host may read it later; the update reads it from device memory.
#pragma once

#include <cstdint>

#include "pannier/kernels/cuda/gradient.h"
#include "pannier/kernels/cuda/stream.h"

namespace pannier::kernels::cuda {

/// What the host knows before the gradients do.
struct DecisionInputs {
  double scale = 1;  ///< What the gradients are multiplied with; the update divides by it.
  double clip = 0;   ///< Greatest norm; 0 does not clip.
  bool skips_nonfinite = true;
};

/// What was decided, as it lies in device memory.
struct Decision {
  double sum_of_squares;  ///< ExactSum::value, of gradients as they are, scaled.
  double norm;            ///< Of the unscaled gradients; infinite where an element is not finite.
  std::int64_t num_nonfinite;
  float grad_factor;
  std::uint32_t skip;
};

/// Decides from `stats` into `decision`, both in device memory, with the expressions and rounding of the host: the norm
/// is sqrt(sum) / scale, the factor clip / (norm + 1e-6) / scale where the norm is above clip, else 1 / scale.
void decide(const DeviceGradientStats* stats, const DecisionInputs& inputs, Decision* decision, Stream stream);

}  // namespace pannier::kernels::cuda
