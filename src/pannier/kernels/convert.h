// Between fp32 and the stored formats: the lossless split master of bf16, and fp16, rounded to nearest even.
#pragma once

#include <cstdint>
#include <string>

#include "pannier/base/parallel.h"

namespace pannier::kernels {

/// Splits fp32 into hi (bf16 bits, rounded half away from zero) and lo, so that join_master gives back the same bits.
/// NaN becomes the canonical NaN (hi 0x7FC0, lo 0).
void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel,
                  const ParallelFor& parallel, const std::string& target = {});

/// Joins hi and lo. Takes lo as 0 where the join would be NaN though hi is not.
void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel,
                 const ParallelFor& parallel, const std::string& target = {});

/// Rounds fp32 to fp16 bits, to nearest even; NaN becomes 0x7E00.
void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel, const ParallelFor& parallel,
             const std::string& target = {});

}  // namespace pannier::kernels
