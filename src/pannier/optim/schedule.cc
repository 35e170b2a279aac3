#include "pannier/optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr std::array<std::pair<const char*, ScheduleType>, 5> kNames{{
    {"WarmupLR", ScheduleType::kWarmupLr},
    {"WarmupDecayLR", ScheduleType::kWarmupDecayLr},
    {"WarmupCosineLR", ScheduleType::kWarmupCosineLr},
    {"OneCycle", ScheduleType::kOneCycle},
    {"LRRangeTest", ScheduleType::kLrRangeTest},
}};

// OneCycle leaves beta2 at this value.
constexpr double kCycleBeta2 = 0.99;

// One value a group, from a list of the right length or one value for all.
std::vector<double> spread(const PerGroup& value, const char* name, std::size_t num_groups) {
  if (!value.is_list) {
    return std::vector<double>(num_groups, value.values.empty() ? 0.0 : value.values.front());
  }
  if (value.values.size() != num_groups) {
    throw ConfigError(fmt::format("schedule: {} is a list of {} values, but there are {} parameter groups", name,
                                  value.values.size(), num_groups));
  }
  return value.values;
}

void require(bool holds, const char* field, const char* wanted, double value) {
  if (!holds) {
    throw ConfigError(fmt::format("schedule: {} must be {}, got {}", field, wanted, value));
  }
}

void require_not_negative(const PerGroup& value, const char* name) {
  for (const double one : value.values) {
    require(std::isfinite(one) && one >= 0.0, name, "a finite number, 0 or more", one);
  }
}

// 0 means no warm-up; 1 counts as 2, because the logarithmic curve has no slope for 1.
double warmup_length(const ScheduleOptions& options) {
  return options.warmup_num_steps == 0 ? 0.0 : static_cast<double>(std::max<std::int64_t>(2, options.warmup_num_steps));
}

// How far the warm-up has come, from 0 to 1.
double warmup_progress(const ScheduleOptions& options, double iteration, double length) {
  if (options.warmup_type == WarmupCurve::kLog) {
    return std::log(iteration + 1.0) * (1.0 / std::log(length));
  }
  return iteration / length;
}

// The factor of WarmupLR and WarmupDecayLR between the least (0) and the greatest lr (1).
double warmup_factor(ScheduleType type, const ScheduleOptions& options, double iteration) {
  const double length = warmup_length(options);
  if (length > 0.0 && iteration < length) {
    return iteration < 0.0 ? 0.0 : warmup_progress(options, iteration, length);
  }
  if (type == ScheduleType::kWarmupLr) {
    return 1.0;
  }
  const auto total = static_cast<double>(options.total_num_steps);
  return std::clamp((total - iteration) / std::max(1.0, total - length), 0.0, 1.0);
}

// The factor of WarmupCosineLR on a group's own lr.
double cosine_factor(const ScheduleOptions& options, double iteration) {
  const double length = warmup_length(options);
  if (length > 0.0 && iteration < length) {
    if (iteration < 0.0) {
      return 0.0;
    }
    const double least = options.warmup_min_ratio;
    return least + warmup_progress(options, iteration, length) * (1.0 - least);
  }
  const double steps = std::max(1.0, static_cast<double>(options.total_num_steps) - length);
  const double progress = std::min(1.0, (iteration - length + 1.0) / steps);
  const double wave = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  return std::max(0.0, options.cos_min_ratio + (1.0 - options.cos_min_ratio) * wave);
}

// The shape of a cycle: `up` iterations up, `down` iterations down.
struct Cycle {
  explicit Cycle(const ScheduleOptions& options)
      : up(options.cycle_first_step_size), down(options.cycle_second_step_size.value_or(up)) {}
  [[nodiscard]] double length() const noexcept { return up + down; }
  double up;
  double down;
};

// How high the cycle stands, from 0 to 1. With stairs the height is rounded down to a whole stair, counted from the
// number of batches, because the continuous height may lie just below a stair.
double cycle_height(const ScheduleOptions& options, const Cycle& cycle, double iteration) {
  const double batch = iteration + 1.0;
  const double turns = std::floor(1.0 + batch / cycle.length());
  const double x = 1.0 + batch / cycle.length() - turns;
  const double ratio = cycle.up / cycle.length();
  const bool rising = x <= ratio;
  const std::int64_t stairs = rising ? options.cycle_first_stair_count
                                     : options.cycle_second_stair_count.value_or(options.cycle_first_stair_count);
  if (stairs <= 0) {
    return rising ? x / ratio : (x - 1.0) / (ratio - 1.0);
  }
  const auto count = static_cast<double>(stairs);
  const double in_cycle = std::fmod(batch, cycle.length());
  const double stair =
      in_cycle <= cycle.up ? in_cycle * count / cycle.up : (cycle.length() - in_cycle) * count / cycle.down;
  return std::floor(stair) / count;
}

// The divisor or factor of the decay after the cycle.
double decay_factor(const ScheduleOptions& options, double rate, double iterations_after) {
  if (options.decay_step_size == 0.0 || rate == 0.0) {
    return 1.0;
  }
  return 1.0 + rate * (iterations_after / options.decay_step_size);
}

void validate_warmup(ScheduleType type, const ScheduleOptions& options) {
  require_not_negative(options.warmup_min_lr, "warmup_min_lr");
  require_not_negative(options.warmup_max_lr, "warmup_max_lr");
  const auto warmup = static_cast<double>(options.warmup_num_steps);
  require(warmup >= 0, "warmup_num_steps", "0 (no warm-up) or more", warmup);
  if (type != ScheduleType::kWarmupLr) {
    const auto total = static_cast<double>(options.total_num_steps);
    require(total > 0, "total_num_steps", "given and positive", total);
  }
  require(options.warmup_min_ratio >= 0.0 && options.warmup_min_ratio <= 1.0, "warmup_min_ratio", "from 0 to 1",
          options.warmup_min_ratio);
  require(options.cos_min_ratio >= 0.0 && options.cos_min_ratio <= 1.0, "cos_min_ratio", "from 0 to 1",
          options.cos_min_ratio);
}

void validate_cycle(const ScheduleOptions& options) {
  if (!options.cycle_min_lr.given() || !options.cycle_max_lr.given()) {
    throw ConfigError("schedule: OneCycle needs both cycle_min_lr and cycle_max_lr");
  }
  require_not_negative(options.cycle_min_lr, "cycle_min_lr");
  require_not_negative(options.cycle_max_lr, "cycle_max_lr");
  require_not_negative(options.cycle_min_mom, "cycle_min_mom");
  require_not_negative(options.cycle_max_mom, "cycle_max_mom");
  const Cycle cycle(options);
  require(std::isfinite(cycle.up) && cycle.up > 0.0, "cycle_first_step_size", "positive", cycle.up);
  require(std::isfinite(cycle.down) && cycle.down >= 0.0, "cycle_second_step_size", "0 or more", cycle.down);
  require(options.decay_step_size >= 0.0, "decay_step_size", "0 (no decay) or more", options.decay_step_size);
  require(options.decay_lr_rate >= 0.0, "decay_lr_rate", "0 or more", options.decay_lr_rate);
  require(std::isfinite(options.decay_mom_rate), "decay_mom_rate", "finite", options.decay_mom_rate);
  const auto first_stairs = static_cast<double>(options.cycle_first_stair_count);
  require(first_stairs >= 0, "cycle_first_stair_count", "0 (no stairs) or more", first_stairs);
  const auto second_stairs = static_cast<double>(options.cycle_second_stair_count.value_or(0));
  require(second_stairs >= 0, "cycle_second_stair_count", "0 (no stairs) or more", second_stairs);
}

void validate_range_test(const ScheduleOptions& options) {
  require_not_negative(options.lr_range_test_min_lr, "lr_range_test_min_lr");
  const auto size = static_cast<double>(options.lr_range_test_step_size);
  require(size > 0, "lr_range_test_step_size", "positive", size);
  require(options.lr_range_test_step_rate >= 0.0, "lr_range_test_step_rate", "0 or more",
          options.lr_range_test_step_rate);
}

}  // namespace

const char* to_string(ScheduleType type) noexcept {
  for (const auto& [name, value] : kNames) {
    if (value == type) {
      return name;
    }
  }
  return "?";
}

ScheduleType schedule_type(const std::string& name) {
  std::string known;
  for (const auto& [text, value] : kNames) {
    if (name == text) {
      return value;
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", text);
  }
  throw ConfigError(fmt::format("unknown schedule '{}'; known are {}", name, known));
}

Schedule::Schedule(ScheduleType type, ScheduleOptions options, std::vector<double> base_lrs)
    : type_(type), options_(std::move(options)), base_lrs_(std::move(base_lrs)) {
  validate();
  step_to(options_.last_batch_iteration);
}

void Schedule::validate() const {
  switch (type_) {
    case ScheduleType::kWarmupLr:
    case ScheduleType::kWarmupDecayLr:
    case ScheduleType::kWarmupCosineLr:
      return validate_warmup(type_, options_);
    case ScheduleType::kOneCycle:
      return validate_cycle(options_);
    case ScheduleType::kLrRangeTest:
      return validate_range_test(options_);
  }
}

void Schedule::step() { step_to(iteration_ + 1); }

void Schedule::step_to(std::int64_t iteration) {
  require(iteration >= -1, "the iteration", "-1 or more", static_cast<double>(iteration));
  iteration_ = iteration;
  switch (type_) {
    case ScheduleType::kWarmupLr:
    case ScheduleType::kWarmupDecayLr:
      return refresh_warmup();
    case ScheduleType::kWarmupCosineLr:
      return scale_lrs(base_lrs_, cosine_factor(options_, static_cast<double>(iteration)));
    case ScheduleType::kOneCycle:
      return refresh_cycle();
    case ScheduleType::kLrRangeTest:
      return refresh_range_test();
  }
}

void Schedule::scale_lrs(const std::vector<double>& lrs, double factor) {
  lrs_ = lrs;
  for (double& lr : lrs_) {
    lr *= factor;
  }
}

void Schedule::refresh_warmup() {
  const std::size_t num_groups = base_lrs_.size();
  lrs_ = spread(options_.warmup_min_lr, "warmup_min_lr", num_groups);
  const std::vector<double> greatest =
      options_.warmup_max_lr.given() ? spread(options_.warmup_max_lr, "warmup_max_lr", num_groups) : base_lrs_;
  const double factor = warmup_factor(type_, options_, static_cast<double>(iteration_));
  for (std::size_t group = 0; group < num_groups; ++group) {
    lrs_[group] += (greatest[group] - lrs_[group]) * factor;
  }
}

void Schedule::refresh_cycle() {
  const std::size_t num_groups = base_lrs_.size();
  const std::vector<double> least_lr = spread(options_.cycle_min_lr, "cycle_min_lr", num_groups);
  const std::vector<double> greatest_lr = spread(options_.cycle_max_lr, "cycle_max_lr", num_groups);
  const std::vector<double> least_mom = spread(options_.cycle_min_mom, "cycle_min_mom", num_groups);
  const std::vector<double> greatest_mom = spread(options_.cycle_max_mom, "cycle_max_mom", num_groups);
  const Cycle cycle(options_);
  const auto iteration = static_cast<double>(iteration_);
  const double after = iteration - cycle.length() + 1.0;
  const bool in_cycle = iteration < cycle.length();
  const double height = iteration < 0.0 || !in_cycle ? 0.0 : cycle_height(options_, cycle, iteration);
  lrs_.resize(num_groups);
  momenta_.clear();
  cycle_momenta_.clear();
  for (std::size_t group = 0; group < num_groups; ++group) {
    const double rise = (greatest_lr[group] - least_lr[group]) * height;
    lrs_[group] =
        in_cycle ? least_lr[group] + rise : least_lr[group] / decay_factor(options_, options_.decay_lr_rate, after);
    if (!options_.cycle_momentum) {
      continue;
    }
    const double momentum = in_cycle ? greatest_mom[group] - (greatest_mom[group] - least_mom[group]) * height
                                     : greatest_mom[group] * decay_factor(options_, options_.decay_mom_rate, after);
    cycle_momenta_.emplace_back(momentum, kCycleBeta2);
    // As the peer does before the first step.
    momenta_.emplace_back(iteration < 0.0 ? least_mom[group] : momentum, kCycleBeta2);
  }
}

void Schedule::refresh_range_test() {
  const double position = static_cast<double>(iteration_ + 1) / static_cast<double>(options_.lr_range_test_step_size);
  const double intervals = options_.lr_range_test_staircase ? std::floor(position) : position;
  scale_lrs(spread(options_.lr_range_test_min_lr, "lr_range_test_min_lr", base_lrs_.size()),
            1.0 + options_.lr_range_test_step_rate * intervals);
}

}  // namespace pannier
