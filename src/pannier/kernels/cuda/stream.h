// The name of a CUDA stream without CUDA's headers, so that this folder's headers compile everywhere.
#pragma once

struct CUstream_st;

namespace pannier::kernels::cuda {

/// What CUDA calls cudaStream_t. Null is the legacy default stream.
using Stream = CUstream_st*;

}  // namespace pannier::kernels::cuda
