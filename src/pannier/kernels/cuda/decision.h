// kernels/decision.h on the device: the host may read what was decided later; the update reads it from device memory.
#pragma once

#include "pannier/kernels/cuda/gradient.h"
#include "pannier/kernels/cuda/stream.h"
#include "pannier/kernels/decision.h"

namespace pannier::kernels::cuda {

/// Decides from `stats` into `decision`, both in device memory, with the expressions and rounding of the host: the norm
/// is sqrt(sum) / scale, the factor clip / (norm + 1e-6) / scale where the norm is above clip, else 1 / scale.
void decide(const DeviceGradientStats* stats, const DecisionInputs& inputs, Decision* decision, Stream stream);

}  // namespace pannier::kernels::cuda
