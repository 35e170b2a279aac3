// Learning-rate schedules as DeepSpeed names and defines them: pure functions of the iteration, one value per parameter
// group, in the order in which the user gave the groups.
//
// The iteration starts at -1: the values of a new schedule are those of the first optimizer step. The engine calls
// step() after each applied (not skipped) optimizer step; iteration i >= 0 then gives the values of step i + 2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pannier {

/// The schedules of the configuration's "scheduler" section.
enum class ScheduleType : std::uint8_t { kWarmupLr, kWarmupDecayLr, kWarmupCosineLr, kOneCycle, kLrRangeTest };

/// The name as the configuration writes it: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest".
[[nodiscard]] const char* to_string(ScheduleType type) noexcept;

/// The type of that name (case counts). Throws ConfigError that lists the names.
[[nodiscard]] ScheduleType schedule_type(const std::string& name);

/// The curve of a warm-up.
enum class WarmupCurve : std::uint8_t { kLog, kLinear };

/// A value for all groups, or a list with one value a group.
struct PerGroup {
  PerGroup() = default;
  PerGroup(double value) : values{value} {}                                       // NOLINT: one value reads well.
  PerGroup(std::vector<double> list) : values(std::move(list)), is_list(true) {}  // NOLINT
  std::vector<double> values;                                                     ///< Empty: not given.
  bool is_list = false;  ///< A list's length must be the number of groups, also when it is 1.
  [[nodiscard]] bool given() const noexcept { return is_list || !values.empty(); }
};

/// The fields of all schedules, with their defaults; each schedule reads its own.
struct ScheduleOptions {
  std::int64_t last_batch_iteration = -1;  ///< Where to start; -1 is the beginning.

  // WarmupLR, WarmupDecayLR, WarmupCosineLR.
  PerGroup warmup_min_lr = 0.0;          ///< Not WarmupCosineLR.
  PerGroup warmup_max_lr = {};           ///< Not given: each group's own lr. Not WarmupCosineLR.
  std::int64_t warmup_num_steps = 1000;  ///< 0: no warm-up. 1 counts as 2, as in DeepSpeed.
  WarmupCurve warmup_type = WarmupCurve::kLog;
  std::int64_t total_num_steps = 0;  ///< WarmupDecayLR and WarmupCosineLR; must be given (positive).
  double warmup_min_ratio = 0.0;     ///< WarmupCosineLR: of the group's own lr.
  double cos_min_ratio = 1e-4;       ///< WarmupCosineLR: where the cosine ends.

  // OneCycle.
  PerGroup cycle_min_lr = {};                                   ///< Must be given.
  PerGroup cycle_max_lr = {};                                   ///< Must be given.
  double decay_lr_rate = 0.0;                                   ///< Decay after the cycle.
  double cycle_first_step_size = 2000;                          ///< Iterations going up.
  std::optional<double> cycle_second_step_size = std::nullopt;  ///< Iterations going down; not given: as many as up.
  std::int64_t cycle_first_stair_count = 0;                     ///< 0: no stairs.
  std::optional<std::int64_t> cycle_second_stair_count = std::nullopt;  ///< Not given: as many as in the first half.
  double decay_step_size = 0;                                           ///< 0: no decay.
  bool cycle_momentum = true;  ///< beta1 runs the other way (beta2 becomes 0.99).
  PerGroup cycle_min_mom = 0.8;
  PerGroup cycle_max_mom = 0.9;
  double decay_mom_rate = 0.0;

  // LRRangeTest.
  PerGroup lr_range_test_min_lr = 1e-3;
  std::int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
};

/// A schedule over the iterations of a run. One thread.
class Schedule {
 public:
  /// `base_lrs` holds each group's own lr. Throws ConfigError for a list of the wrong length (both lengths are named)
  /// and for values out of range.
  Schedule(ScheduleType type, ScheduleOptions options, std::vector<double> base_lrs);

  /// Goes one iteration on.
  void step();
  /// Jumps to `iteration` (-1 or more). Values are a function of the iteration alone, so a resumed run continues as if
  /// it had never stopped.
  void step_to(std::int64_t iteration);

  [[nodiscard]] ScheduleType type() const noexcept { return type_; }
  /// The iteration of the values below; with `step_to` the whole state of a schedule.
  [[nodiscard]] std::int64_t last_iteration() const noexcept { return iteration_; }
  /// One lr per group.
  [[nodiscard]] const std::vector<double>& lrs() const noexcept { return lrs_; }
  /// One pair of betas per group; empty unless a OneCycle with cycle_momentum. For rules without betas the caller
  /// ignores it.
  [[nodiscard]] const std::vector<std::pair<double, double>>& momenta() const noexcept { return momenta_; }
  /// The same as the cycle has it. Differs before the first step, which the peer makes with the cycle's least momentum,
  /// while its curve begins at the greatest.
  [[nodiscard]] const std::vector<std::pair<double, double>>& cycle_momenta() const noexcept { return cycle_momenta_; }

 private:
  void validate() const;
  void scale_lrs(const std::vector<double>& lrs, double factor);
  void refresh_warmup();
  void refresh_cycle();
  void refresh_range_test();

  ScheduleType type_;
  ScheduleOptions options_;
  std::vector<double> base_lrs_;
  std::int64_t iteration_ = -1;
  std::vector<double> lrs_;
  std::vector<std::pair<double, double>> momenta_;
  std::vector<std::pair<double, double>> cycle_momenta_;
};

}  // namespace pannier
