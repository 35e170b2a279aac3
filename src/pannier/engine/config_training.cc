// The optimizer and scheduler sections.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "pannier/base/error.h"
#include "pannier/engine/config_build.h"

namespace pannier::config {
namespace {

using kernels::Algorithm;

// The defaults of an optimizer type, as DeepSpeed 0.19.6 has them.
struct OptimizerType {
  std::string_view name;
  Algorithm algorithm;
  double lr;
  double eps;
};

constexpr auto kOptimizers = std::to_array<OptimizerType>({
    {"Adam", Algorithm::kAdam, 1e-3, 1e-8},
    {"AdamW", Algorithm::kAdamW, 1e-3, 1e-8},
    {"SGD", Algorithm::kSgd, 1e-3, 1e-8},
    {"Adagrad", Algorithm::kAdagrad, 1e-2, 1e-10},
    {"Lion", Algorithm::kLion, 1e-3, 1e-8},
});

constexpr auto kRefusedOptimizers = std::to_array<std::string_view>(
    {"Muon", "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "RMSprop", "Adadelta",
     "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS", "SparseAdam", "Adafactor"});

bool same_letters(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

const OptimizerType* find_optimizer(const std::string& written, Report& report) {
  const auto is_it = [&written](std::string_view name) { return same_letters(name, written); };
  const auto known = std::ranges::find_if(kOptimizers, is_it, &OptimizerType::name);
  if (known != kOptimizers.end()) {
    return &*known;
  }
  std::vector<std::string_view> names;
  for (const OptimizerType& type : kOptimizers) {
    names.push_back(type.name);
  }
  report.wrong("optimizer.type",
               fmt::format("\"{}\" is {}; supported are {}", written,
                           std::ranges::any_of(kRefusedOptimizers, is_it) ? "known, but not supported by this version"
                                                                          : "not an optimizer that Pannier knows",
                           fmt::join(names, ", ")));
  return nullptr;
}

// The type of a section, or nothing; a section with parameters and no type is an error.
std::optional<std::string> type_of(const std::string& section, const Values& values, const Json& root, Report& report) {
  const auto found = root.find(section);
  if (found != root.end() && found->is_object() && found->contains("params") && !found->contains("type")) {
    report.wrong(section + ".type", fmt::format("not given, but {}.params is", section));
  }
  return values.find<std::string>(section + ".type");
}

void check_sgd(const OptimizerConfig& optimizer, Report& report) {
  const kernels::Hyperparameters& hyper = optimizer.hyper;
  if (hyper.nesterov && (hyper.momentum == 0.0 || hyper.dampening != 0.0)) {
    report.wrong("optimizer.params.nesterov",
                 fmt::format("needs a momentum above 0 and a dampening of 0, but they are {} and {}", hyper.momentum,
                             hyper.dampening));
  }
}

// Says where the rule is not what its name or adam_w_mode says: DeepSpeed's "Adam" is AdamW unless adam_w_mode is
// false, and its "AdamW" never looks at that.
void note_adam(const OptimizerConfig& optimizer, Algorithm named, const Values& values, Report& report) {
  const std::string mode = "optimizer.params.adam_w_mode";
  if (named == Algorithm::kAdam && !values.has(mode)) {
    report.notes.push_back(
        fmt::format("optimizer.type \"{}\" is AdamW (decoupled decay); adam_w_mode false would make it Adam (L2 decay)",
                    optimizer.type));
  } else if (named == Algorithm::kAdamW && !values.flag(mode)) {
    report.notes.push_back(
        fmt::format("{} false is ignored: optimizer.type \"{}\" is AdamW (decoupled decay)", mode, optimizer.type));
  }
}

// What a WarmupDecayLR, WarmupCosineLR or OneCycle can't do without.
void require_given(const SchedulerConfig& scheduler, const Json& params, Report& report) {
  std::vector<const char*> needed;
  if (scheduler.type == ScheduleType::kWarmupDecayLr || scheduler.type == ScheduleType::kWarmupCosineLr) {
    needed = {"total_num_steps"};
  } else if (scheduler.type == ScheduleType::kOneCycle) {
    needed = {"cycle_min_lr", "cycle_max_lr"};
  }
  for (const char* key : needed) {
    if (!params.contains(key) || params[key].is_null()) {
      report.wrong(fmt::format("scheduler.params.{}", key), fmt::format("{} needs it", to_string(scheduler.type)));
    }
  }
}

ScheduleOptions build_schedule(const Values& values) {
  const std::string params = "scheduler.params.";
  ScheduleOptions options;
  options.last_batch_iteration = values.whole(params + "last_batch_iteration");
  options.warmup_min_lr = values.per_group(params + "warmup_min_lr");
  options.warmup_max_lr = values.find<PerGroup>(params + "warmup_max_lr").value_or(PerGroup());
  options.warmup_num_steps = values.whole(params + "warmup_num_steps");
  options.warmup_type = values.text(params + "warmup_type") == "log" ? WarmupCurve::kLog : WarmupCurve::kLinear;
  options.total_num_steps = values.find<std::int64_t>(params + "total_num_steps").value_or(0);
  options.warmup_min_ratio = values.number(params + "warmup_min_ratio");
  options.cos_min_ratio = values.number(params + "cos_min_ratio");
  options.cycle_min_lr = values.find<PerGroup>(params + "cycle_min_lr").value_or(PerGroup());
  options.cycle_max_lr = values.find<PerGroup>(params + "cycle_max_lr").value_or(PerGroup());
  options.decay_lr_rate = values.number(params + "decay_lr_rate");
  options.cycle_first_step_size = values.number(params + "cycle_first_step_size");
  options.cycle_second_step_size = values.find<double>(params + "cycle_second_step_size");
  options.cycle_first_stair_count = values.whole(params + "cycle_first_stair_count");
  options.cycle_second_stair_count = values.find<std::int64_t>(params + "cycle_second_stair_count");
  options.decay_step_size = values.number(params + "decay_step_size");
  options.cycle_momentum = values.flag(params + "cycle_momentum");
  options.cycle_min_mom = values.per_group(params + "cycle_min_mom");
  options.cycle_max_mom = values.per_group(params + "cycle_max_mom");
  options.decay_mom_rate = values.number(params + "decay_mom_rate");
  options.lr_range_test_min_lr = values.per_group(params + "lr_range_test_min_lr");
  options.lr_range_test_step_size = values.whole(params + "lr_range_test_step_size");
  options.lr_range_test_step_rate = values.number(params + "lr_range_test_step_rate");
  options.lr_range_test_staircase = values.flag(params + "lr_range_test_staircase");
  return options;
}

}  // namespace

std::optional<OptimizerConfig> build_optimizer(const Values& values, const Json& root, Report& report) {
  const std::optional<std::string> written = type_of("optimizer", values, root, report);
  const OptimizerType* type = written ? find_optimizer(*written, report) : nullptr;
  if (type == nullptr) {
    return std::nullopt;
  }
  const std::string params = "optimizer.params.";
  OptimizerConfig optimizer{.type = *written, .algorithm = type->algorithm};
  const bool is_adam = type->algorithm == Algorithm::kAdam || type->algorithm == Algorithm::kAdamW;
  if (is_adam && values.flag(params + "adam_w_mode")) {
    optimizer.algorithm = Algorithm::kAdamW;
  }
  // torch's own AdamW, which torch_adam asks for, decays by default.
  const bool decays = optimizer.algorithm == Algorithm::kAdamW && values.flag(params + "torch_adam");
  kernels::Hyperparameters& hyper = optimizer.hyper;
  hyper.lr = values.find<double>(params + "lr").value_or(type->lr);
  hyper.eps = values.find<double>(params + "eps").value_or(type->eps);
  hyper.weight_decay = values.find<double>(params + "weight_decay").value_or(decays ? 0.01 : 0.0);
  if (const auto betas = values.find<PerGroup>(params + "betas")) {
    hyper.beta1 = betas->values.at(0);
    hyper.beta2 = betas->values.at(1);
  }
  hyper.bias_correction = values.flag(params + "bias_correction");
  hyper.momentum = values.number(params + "momentum");
  hyper.dampening = values.number(params + "dampening");
  hyper.nesterov = values.flag(params + "nesterov");
  hyper.lr_decay = values.number(params + "lr_decay");
  optimizer.initial_accumulator_value = values.number(params + "initial_accumulator_value");
  check_sgd(optimizer, report);
  if (is_adam) {
    note_adam(optimizer, type->algorithm, values, report);
  }
  return optimizer;
}

std::optional<SchedulerConfig> build_scheduler(const Values& values, const Json& root, Report& report) {
  const std::optional<std::string> written = type_of("scheduler", values, root, report);
  if (!written) {
    return std::nullopt;
  }
  SchedulerConfig scheduler;
  try {
    scheduler.type = schedule_type(*written);
  } catch (const ConfigError& error) {
    report.wrong("scheduler.type", error.what());
    return std::nullopt;
  }
  const Json section = root.at("scheduler");
  const auto params = section.find("params");
  require_given(scheduler, params != section.end() && params->is_object() ? *params : Json::object(), report);
  scheduler.options = build_schedule(values);
  return scheduler;
}

}  // namespace pannier::config
