// One pass over flat arrays: an operation that handles packs of elements, and the launch that walks it over them. For
// .cu files only.
#pragma once

#include <cstdint>

#include "pannier/kernels/cuda/cuda_error.h"
#include "pannier/kernels/cuda/lanes-inl.h"
#include "pannier/kernels/cuda/stream.h"

namespace pannier::kernels::cuda {

template <class Operation>
__global__ void __launch_bounds__(kThreads) map_kernel(Operation operation, std::int64_t numel, bool is_aligned) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kPieceNumel;
  if (is_aligned && begin + kPieceNumel <= numel) {
    operation.template run<kPackNumel>(begin + threadIdx.x * kPackNumel);
    return;
  }
  for (std::int64_t i = begin + threadIdx.x; i < min(begin + kPieceNumel, numel); i += kThreads) {
    operation.template run<1>(i);
  }
}

/// Calls operation.run<N>(i) for every element once, N neighbours at a time.
template <class Operation>
void launch_map(const Operation& operation, std::int64_t numel, bool is_aligned, Stream stream, const char* what) {
  if (numel > 0) {
    const auto num_pieces = static_cast<unsigned>((numel + kPieceNumel - 1) / kPieceNumel);
    map_kernel<<<num_pieces, kThreads, 0, stream>>>(operation, numel, is_aligned);
    check_launch(what);
  }
}

}  // namespace pannier::kernels::cuda
