// One update of one tensor outside of an engine: what `step()` of an optimizer does whose parameters no engine manages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "pannier/binding/classes.h"

namespace pannier::binding {

/// Updates `weight` in place by the engine's arithmetic. All tensors are contiguous, fp32, on the CPU and of one size;
/// `state2` is empty for rules with one state. `step` counts from 1; `numbers` are a parameter group's. Throws
/// ConfigError for an unknown rule and for tensors that do not match.
void update_tensor(const std::string& rule, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& state1,
                   const at::Tensor& state2, std::int64_t step, const Numbers& numbers);

}  // namespace pannier::binding
