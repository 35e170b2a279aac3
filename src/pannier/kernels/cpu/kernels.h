// The kernels behind the public functions, looked up by target. Each runs on the calling thread, under FloatModes.
#pragma once

#include <cstdint>

#include "pannier/kernels/cpu/targets.h"
#include "pannier/kernels/gradient.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels::cpu {

/// What a kernel is compiled for.
struct UpdateVariant {
  Algorithm algorithm;
  StateFormat format;
  GradType grad_type;
  bool has_momentum;  ///< SGD only.
  bool nesterov;      ///< SGD with momentum only.
};

using UpdateKernel = void (*)(const UpdateCoefficients&, const UpdateBuffers&);
using FindUpdateKernel = UpdateKernel (*)(const UpdateVariant&);

/// Null for a combination of format and gradient type that cannot occur. One function a family and file.
UpdateKernel find_adam_kernel(Target target, const UpdateVariant& variant);
UpdateKernel find_sgd_kernel(Target target, const UpdateVariant& variant);
UpdateKernel find_adagrad_kernel(Target target, const UpdateVariant& variant);
UpdateKernel find_lion_kernel(Target target, const UpdateVariant& variant);

/// The plain loops of reference.h, for every family.
UpdateKernel find_plain_update_kernel(const UpdateVariant& variant);

/// The sum of squares of one block of at most kBlockNumel elements; finite exactly where every element is.
using BlockSumKernel = double (*)(const void* grad, std::int64_t numel);
BlockSumKernel find_block_sum_kernel(Target target, GradType type);
BlockSumKernel find_plain_block_sum_kernel(GradType type);

/// sum = grad, or sum += grad.
using AccumulateKernel = void (*)(float* sum, const void* grad, std::int64_t numel);
AccumulateKernel find_accumulate_kernel(Target target, GradType type, bool first);
AccumulateKernel find_plain_accumulate_kernel(GradType type, bool first);

/// Conversions between fp32 and the stored formats.
struct ConvertKernels {
  void (*split)(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel);
  void (*join)(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel);
  void (*to_fp16)(const float* from, std::uint16_t* to, std::int64_t numel);
};
ConvertKernels find_convert_kernels(Target target);
ConvertKernels find_plain_convert_kernels();

}  // namespace pannier::kernels::cpu
