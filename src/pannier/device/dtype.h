// One place where torch's element types become the kernels' formats.
#pragma once

#include <c10/core/ScalarType.h>

#include "pannier/base/error.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/state_shape.h"

namespace pannier {

/// The kernels' name for a gradient's element type. Throws InternalError for a type that no parameter of ours has.
[[nodiscard]] inline kernels::GradType grad_type_of(at::ScalarType dtype) {
  PANNIER_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                "a parameter that is neither fp32, fp16 nor bf16");
  return dtype == at::kFloat  ? kernels::GradType::kFp32
         : dtype == at::kHalf ? kernels::GradType::kFp16
                              : kernels::GradType::kBf16;
}

/// How parameters of this element type keep their master weight.
[[nodiscard]] inline kernels::StateFormat state_format_of(at::ScalarType dtype) {
  switch (grad_type_of(dtype)) {
    case kernels::GradType::kFp32:
      return kernels::StateFormat::kFp32;
    case kernels::GradType::kFp16:
      return kernels::StateFormat::kFp16;
    case kernels::GradType::kBf16:
      break;
  }
  return kernels::StateFormat::kBf16;
}

/// Bytes per element of a format with `num_states` fp32 states.
[[nodiscard]] inline StateShape state_shape_of(kernels::StateFormat format, int num_states) {
  switch (format) {
    case kernels::StateFormat::kFp32:
      return {.param_nbytes = 4, .rest_nbytes = 0, .num_states = num_states};
    case kernels::StateFormat::kFp16:
      return {.param_nbytes = 2, .rest_nbytes = 4, .num_states = num_states};
    case kernels::StateFormat::kBf16:
      break;
  }
  return {.param_nbytes = 2, .rest_nbytes = 2, .num_states = num_states};
}

}  // namespace pannier
