// How long a step takes, as a pure function of numbers: which share of the parameters is best streamed (states travel
// to the device and back, hidden behind backward and the next forward) and which is best updated on the host.
//
// A step is a forward, a backward and the seconds after it that nothing hides. Streamed states go up in backward; they
// come down from the update to the next peak of activations, at the end of the next forward. The host's update starts
// when the norm is known, at the end of backward, and is exposed; with `overlap_step` it runs in the next forward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "pannier/layout/state_shape.h"
#include "pannier/plan/link_and_host_rates.h"

namespace pannier {

/// Seconds of one micro-batch on the device; what is not known hides nothing.
struct StepObservation {
  std::optional<double> forward_s{};
  std::optional<double> backward_s{};
  std::optional<double> to_peak_s{};  ///< From the start of a forward to the peak of memory; empty: all of it.
};

/// What the split is computed from: the shard's parameters whose states do not rest on the device.
struct SplitInput {
  std::int64_t numel = 0;
  double state_nbytes = 10;          ///< Per parameter, that a streamed one moves each way.
  double gradient_nbytes = 2;        ///< Per parameter, down on the host path; 4 when sums over micro-batches cross.
  double param_nbytes = 2;           ///< Per parameter, up on the host path.
  double host_dram_nbytes = 30;      ///< Host memory traffic per parameter on the host path, copies included.
  double streamed_dram_nbytes = 20;  ///< Host memory traffic per streamed parameter, both ways together.
  double update_nbytes = kRatedUpdateNbytes;  ///< Memory traffic of one parameter's update, wherever it runs.
  double gather_nbytes = 0;      ///< Per parameter, up in each forward and each backward: it rests in host memory.
  std::size_t slack_nbytes = 0;  ///< Free below the budget at the peak: streamed states that need not come down.
  /// Free at the end of backward for streamed states and for the gradients of their parameters; empty: enough.
  std::optional<std::size_t> room_nbytes{};
  bool overlap_step = false;       ///< The host's update may run on in the next forward.
  std::int64_t micro_batches = 1;  ///< Forwards and backwards a step.
  StepObservation observation{};
  LinkAndHostRates rates{};
  void validate() const;  ///< Throws ConfigError for what is negative or not finite.
};

/// The bytes of a state format: everything of SplitInput that follows from it. `accumulates`: gradients are fp32 sums.
/// `rests_on_host`: parameters do too, and a streamed one travels with its states.
[[nodiscard]] SplitInput split_input(const StateShape& shape, std::int64_t numel, bool accumulates,
                                     bool rests_on_host = false);

/// One resource: how long it is busy, and how long it may be without being seen.
struct ResourceTime {
  double needed_s = 0.0;
  double window_s = 0.0;
};

/// The resources of a split.
struct SplitTimes {
  ResourceTime link_up;        ///< Window: backward and what is exposed; with overlap the next forward too.
  ResourceTime link_down;      ///< From the update to the next peak.
  ResourceTime dram;           ///< From the end of backward to the next peak.
  ResourceTime cores;          ///< What is exposed; with overlap the next forward too.
  ResourceTime device_update;  ///< Of streamed parameters; always exposed.
};

/// A split and what is expected of it.
struct SplitPlan {
  double streamed_share = 1.0;
  double host_share = 0.0;  ///< The two add up to 1.
  double predicted_step_s = 0.0;
  double exposed_s = 0.0;
  bool windows_known = false;            ///< Forward and backward were known; if not, they count as nothing.
  std::size_t kept_nbytes = 0;           ///< Of streamed states: what slack lets stay on the device through the peak.
  std::int64_t most_streamed_numel = 0;  ///< What the room holds at the end of backward.
  /// What would have to be faster or larger: "link up", "link down", "DRAM", "cores", "device memory" or "nothing".
  std::string binds = "nothing";
  SplitTimes times;
};

/// Predicts the step for a given share of streamed parameters. Throws ConfigError for a share outside [0, 1].
[[nodiscard]] SplitPlan evaluate_split(const SplitInput& input, double streamed_share);

/// Finds the share with the shortest step; among equals the one whose busiest resource is least busy.
[[nodiscard]] SplitPlan solve_split(const SplitInput& input);

/// Forward and backward of one micro-batch from its floating-point operations: 2 a parameter and token forward and 4
/// backward, 6 where activations are computed anew. Empty when `flops_per_s` or `tokens` is not positive.
[[nodiscard]] StepObservation predict_compute(std::int64_t numel, double tokens, double flops_per_s, bool recompute);

}  // namespace pannier
