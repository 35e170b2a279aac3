#include <string>

#include "pannier/base/error.h"
#include "pannier/kernels/cuda/cuda_error.h"

namespace pannier::kernels::cuda {

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) {
    return;
  }
  const std::string text = std::string(what) + ": " + cudaGetErrorName(result) + ", " + cudaGetErrorString(result);
  if (result == cudaErrorMemoryAllocation) {
    throw OutOfMemoryError("CUDA out of memory. " + text);
  }
  throw InternalError(text);
}

}  // namespace pannier::kernels::cuda
