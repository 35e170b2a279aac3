// The decision of a step on a GPU. Sums, counts and decision lie in device memory; a copy of the decision sets out for
// the host as soon as it is made.
#pragma once

#include <memory>

#include "pannier/device/gradient_judge.h"

#include <c10/core/Device.h>

namespace pannier {

[[nodiscard]] std::unique_ptr<GradientJudge> make_cuda_judge(c10::DeviceIndex device);

}  // namespace pannier
