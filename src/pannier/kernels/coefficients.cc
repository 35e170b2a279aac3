#include <fmt/format.h>

#include <cmath>

#include "pannier/base/error.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels {
namespace {

// Rounds once, and makes -0 into +0: fma(+0, w, w) is w for every finite w, -0 included; fma(-0, w, w) is not.
float rounded(double x) { return static_cast<float>(x) + 0.0F; }

void set_moments(UpdateCoefficients& c, const Hyperparameters& hyper) {
  c.beta1 = rounded(hyper.beta1);
  c.one_minus_beta1 = rounded(1 - hyper.beta1);
  c.beta2 = rounded(hyper.beta2);
  c.one_minus_beta2 = rounded(1 - hyper.beta2);
}

void set_adam(UpdateCoefficients& c, const Hyperparameters& hyper, std::int64_t step) {
  set_moments(c, hyper);
  c.eps = rounded(hyper.eps);
  double step_size = hyper.lr;
  if (hyper.bias_correction) {
    step_size /= 1 - std::pow(hyper.beta1, static_cast<double>(step));
    c.inv_sqrt_bias2 = rounded(1 / std::sqrt(1 - std::pow(hyper.beta2, static_cast<double>(step))));
  }
  c.neg_step_size = rounded(-step_size);
}

}  // namespace

UpdateCoefficients make_coefficients(Algorithm algorithm, const Hyperparameters& hyper, std::int64_t step,
                                     float grad_factor) {
  PANNIER_CHECK(step >= 1, fmt::format("steps count from 1, got {}", step));
  UpdateCoefficients c;
  c.grad_factor = grad_factor;
  c.neg_step_size = rounded(-hyper.lr);
  const bool is_decoupled = algorithm == Algorithm::kAdamW || algorithm == Algorithm::kLion;
  c.neg_lr_decay = is_decoupled ? rounded(-hyper.lr * hyper.weight_decay) : 0.0F;
  c.weight_decay = is_decoupled ? 0.0F : rounded(hyper.weight_decay);
  switch (algorithm) {
    case Algorithm::kAdamW:
    case Algorithm::kAdam:
      set_adam(c, hyper, step);
      break;
    case Algorithm::kSgd:
      c.beta1 = rounded(hyper.momentum);
      c.one_minus_beta1 = step == 1 ? 1.0F : rounded(1 - hyper.dampening);
      c.nesterov = hyper.nesterov;
      break;
    case Algorithm::kAdagrad:
      c.eps = rounded(hyper.eps);
      c.neg_step_size = rounded(-hyper.lr / (1 + static_cast<double>(step - 1) * hyper.lr_decay));
      break;
    case Algorithm::kLion:
      set_moments(c, hyper);
      break;
  }
  return c;
}

std::vector<std::string> state_names(Algorithm algorithm, double momentum) {
  switch (algorithm) {
    case Algorithm::kAdamW:
    case Algorithm::kAdam:
      return {"exp_avg", "exp_avg_sq"};
    case Algorithm::kSgd:
      return momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
    case Algorithm::kAdagrad:
      return {"sum"};
    case Algorithm::kLion:
      return {"exp_avg"};
  }
  return {};
}

}  // namespace pannier::kernels
