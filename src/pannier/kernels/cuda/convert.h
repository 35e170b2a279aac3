// convert.h on a GPU. Pointers are to device memory; calls return at once, and the work is done in the stream's order.
#pragma once

#include <cstdint>

#include "pannier/kernels/cuda/stream.h"

namespace pannier::kernels::cuda {

/// See kernels::split_master.
void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel, Stream stream);

/// See kernels::join_master.
void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel, Stream stream);

/// See kernels::to_fp16.
void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel, Stream stream);

}  // namespace pannier::kernels::cuda
