// The loss scale of fp16 training. The loss is multiplied by the scale so that small gradients survive in 16 bits; a
// step whose gradients overflowed is skipped and lowers the scale, many good steps raise it again.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pannier {

/// Every step overflows and the scale can't go lower: the gradients themselves are non-finite. A RuntimeError in
/// Python.
class LossScaleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How the loss scale behaves; the fields and defaults of DeepSpeed's fp16 section.
struct LossScaleOptions {
  double static_scale = 0;                ///< `loss_scale`: 0 is dynamic; otherwise the scale, which never changes.
  int initial_scale_power = 16;           ///< A dynamic scale starts at 2 to this power.
  std::int64_t loss_scale_window = 1000;  ///< Good steps before the scale doubles.
  int hysteresis = 2;                     ///< Overflows that it takes to halve the scale.
  bool consecutive_hysteresis = false;    ///< A good step restores the hysteresis.
  double min_loss_scale = 1;              ///< The scale never goes below.
  [[nodiscard]] bool is_dynamic() const noexcept { return static_scale == 0; }
  /// Throws ConfigError naming the field, its range and its value.
  void validate() const;
};

/// What a checkpoint keeps of a scaler.
struct LossScalerState {
  double scale = 1;
  std::int64_t iteration = 0;
  std::int64_t last_overflow_iteration = -1;
  int hysteresis_left = 2;
  std::int64_t skipped_in_a_row = 0;
};

/// Decides the loss scale of the next step. One thread.
class LossScaler {
 public:
  /// No scaling: scale 1, never changed. For fp32 and bf16.
  LossScaler() : LossScaler(LossScaleOptions{.static_scale = 1}) {}
  explicit LossScaler(const LossScaleOptions& options);

  /// The factor for the loss of the current step; gradients are divided by the same value, read before update().
  [[nodiscard]] double scale() const noexcept { return state_.scale; }
  [[nodiscard]] bool is_dynamic() const noexcept { return options_.is_dynamic(); }

  /// Ends a step. `overflow`: a gradient was not finite, so the step was skipped; `first_bad_parameter` names the first
  /// such parameter. Throws LossScaleError when a dynamic scale at its minimum would have to go down; the scale and the
  /// hysteresis then stay as they are and the step counts as skipped.
  void update(bool overflow, const std::string& first_bad_parameter);

  /// Skipped steps since the last good one.
  [[nodiscard]] std::int64_t skipped_in_a_row() const noexcept { return state_.skipped_in_a_row; }
  [[nodiscard]] const LossScalerState& state() const noexcept { return state_; }
  /// Takes over a saved state. A static scaler keeps its own scale. Throws ConfigError for a state that can't be.
  void load_state(const LossScalerState& state);

 private:
  void lower(const std::string& first_bad_parameter);
  void maybe_raise();

  LossScaleOptions options_;
  LossScalerState state_;
};

}  // namespace pannier
