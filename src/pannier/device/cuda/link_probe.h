// How fast this GPU's link and memory copy.
#pragma once

#include <cuda_runtime_api.h>

#include "pannier/hardware/rates.h"

namespace pannier {

/// Copies between pinned host memory and the device on two streams: each way alone, both at once, and on the device.
/// All zero where there is no memory for it.
[[nodiscard]] LinkRates measure_cuda_links(cudaStream_t up, cudaStream_t down, double most_seconds);

}  // namespace pannier
