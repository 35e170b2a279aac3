// Turns what CUDA answers into exceptions.
#pragma once

#include <cuda_runtime_api.h>

namespace pannier::kernels::cuda {

/// Throws OutOfMemoryError or InternalError, naming `what` was done, unless `result` is cudaSuccess.
void check_cuda(cudaError_t result, const char* what);

/// Throws where the launch before it on this thread was refused.
inline void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

}  // namespace pannier::kernels::cuda
