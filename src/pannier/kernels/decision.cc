#include "pannier/kernels/decision.h"

#include <cmath>
#include <limits>

namespace pannier::kernels {

Decision decide(const GradientStats& stats, const DecisionInputs& inputs) noexcept {
  Decision decision{};
  decision.sum_of_squares = stats.sum_of_squares.value();
  decision.num_nonfinite = stats.num_nonfinite;
  const bool has_nonfinite = stats.num_nonfinite > 0;
  decision.norm =
      has_nonfinite ? std::numeric_limits<double>::infinity() : std::sqrt(decision.sum_of_squares) / inputs.scale;
  const bool skip = has_nonfinite && inputs.skips_nonfinite;
  const double guarded = decision.norm + 1e-6;
  const bool clips = !skip && inputs.clip > 0.0 && std::isfinite(decision.norm) && guarded > inputs.clip;
  const double coefficient = clips ? inputs.clip / guarded : 1.0;
  decision.grad_factor = static_cast<float>(coefficient / inputs.scale);
  decision.skip = skip ? 1 : 0;
  return decision;
}

}  // namespace pannier::kernels
