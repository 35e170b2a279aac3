#include "pannier/optim/loss_scaler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr double kFactor = 2.0;
// Growth ends here: a loss times more would not be a finite fp32 number.
constexpr double kGreatestScale = 0x1p100;

}  // namespace

void LossScaleOptions::validate() const {
  const auto require = [](bool holds, const char* field, const char* wanted, double value) {
    if (!holds) {
      throw ConfigError(fmt::format("fp16.{} must be {}, got {}", field, wanted, value));
    }
  };
  require(std::isfinite(static_scale) && static_scale >= 0 && static_scale <= kGreatestScale, "loss_scale",
          "0 (dynamic) or a positive number", static_scale);
  if (!is_dynamic()) {
    return;
  }
  require(initial_scale_power >= 0 && initial_scale_power <= 100, "initial_scale_power", "from 0 to 100",
          initial_scale_power);
  require(loss_scale_window > 0, "loss_scale_window", "positive", static_cast<double>(loss_scale_window));
  require(hysteresis > 0, "hysteresis", "positive", hysteresis);
  require(std::isfinite(min_loss_scale) && min_loss_scale > 0, "min_loss_scale", "positive", min_loss_scale);
  const double start = std::ldexp(1.0, initial_scale_power);
  if (min_loss_scale > start) {
    throw ConfigError(fmt::format("fp16.min_loss_scale {} is above the scale at the start, 2^initial_scale_power = {}",
                                  min_loss_scale, start));
  }
}

LossScaler::LossScaler(const LossScaleOptions& options) : options_(options) {
  options_.validate();
  state_.scale = is_dynamic() ? std::ldexp(1.0, options_.initial_scale_power) : options_.static_scale;
  state_.hysteresis_left = options_.hysteresis;
}

void LossScaler::update(bool overflow, const std::string& first_bad_parameter) {
  state_.skipped_in_a_row = overflow ? state_.skipped_in_a_row + 1 : 0;
  if (is_dynamic()) {
    if (overflow) {
      lower(first_bad_parameter);
    } else {
      maybe_raise();
    }
  }
  ++state_.iteration;
}

void LossScaler::lower(const std::string& first_bad_parameter) {
  state_.last_overflow_iteration = state_.iteration;
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
    return;
  }
  if (state_.scale <= options_.min_loss_scale) {
    ++state_.iteration;
    throw LossScaleError(
        fmt::format("the loss scale is at its minimum {} and gradients still overflow: {} steps were skipped in a row; "
                    "the first parameter with a non-finite gradient is {}. A scale can't help when the loss or the "
                    "gradients themselves are inf or nan",
                    state_.scale, state_.skipped_in_a_row,
                    first_bad_parameter.empty() ? "on another rank" : "'" + first_bad_parameter + "'"));
  }
  state_.scale = std::max(state_.scale / kFactor, options_.min_loss_scale);
}

void LossScaler::maybe_raise() {
  if (options_.consecutive_hysteresis) {
    state_.hysteresis_left = options_.hysteresis;
  }
  const std::int64_t good_steps = state_.iteration - state_.last_overflow_iteration - 1;
  if (good_steps == 0 || good_steps % options_.loss_scale_window != 0) {
    return;
  }
  state_.hysteresis_left = options_.hysteresis;
  state_.scale = std::min(state_.scale * kFactor, std::max(state_.scale, kGreatestScale));
}

void LossScaler::load_state(const LossScalerState& state) {
  if (!std::isfinite(state.scale) || state.scale <= 0 || state.hysteresis_left < 1 || state.iteration < 0 ||
      state.last_overflow_iteration < -1 || state.last_overflow_iteration > state.iteration ||
      state.skipped_in_a_row < 0) {
    throw ConfigError(fmt::format(
        "the saved loss scaler can't be: scale {}, iteration {}, last overflow {}, hysteresis {}, skipped {}",
        state.scale, state.iteration, state.last_overflow_iteration, state.hysteresis_left, state.skipped_in_a_row));
  }
  const double own_scale = state_.scale;
  state_ = state;
  if (!is_dynamic()) {
    state_.scale = own_scale;
  }
}

}  // namespace pannier
