#include "pannier/binding/plain_update.h"

#include <array>

#include "pannier/device/compute.h"
#include "pannier/kernels/update.h"

namespace pannier::binding {
namespace {

float* data_of(const at::Tensor& tensor, std::int64_t numel, const char* name) {
  const bool fits = tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
  if (!fits || tensor.numel() != numel) {
    throw ConfigError(fmt::format("{} must be {} contiguous fp32 values on the CPU", name, numel));
  }
  return tensor.data_ptr<float>();
}

}  // namespace

void update_tensor(const std::string& rule, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& state1,
                   const at::Tensor& state2, std::int64_t step, const Numbers& numbers) {
  const std::optional<kernels::Algorithm> algorithm = algorithm_of(rule);
  if (!algorithm || step < 1) {
    throw ConfigError(fmt::format("an update needs a rule and a step from 1, got '{}' and {}", rule, step));
  }
  c10::List<Numbers> groups;
  groups.push_back(numbers);
  const std::int64_t numel = weight.numel();
  const kernels::UpdateBuffers buffers{
      .param = data_of(weight, numel, "the weight"),
      .state1 = data_of(state1, numel, "the first state"),
      .state2 = state2.numel() == 0 ? nullptr : data_of(state2, numel, "the second state"),
      .grad = data_of(grad, numel, "the gradient"),
      .grad_type = kernels::GradType::kFp32,
      .numel = numel};
  const auto coefficients = kernels::make_coefficients(*algorithm, to_hyperparameters(groups).front(), step, 1.0F);
  CpuCompute().update(*algorithm, kernels::StateFormat::kFp32, {{coefficients, buffers}}, {});
}

}  // namespace pannier::binding
