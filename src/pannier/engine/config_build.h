// The last part of reading a configuration: values become the plain structs of Config, and what can't go together is
// found.
#pragma once

#include "pannier/engine/config.h"
#include "pannier/engine/config_report.h"
#include "pannier/engine/config_values.h"

namespace pannier::config {

/// The whole configuration, but for notes and "auto" keys, which stay in the report.
[[nodiscard]] Config build_config(const Values& values, const Json& root, Report& report);

/// The optimizer and scheduler sections; empty where the section is absent or wrong.
[[nodiscard]] std::optional<OptimizerConfig> build_optimizer(const Values& values, const Json& root, Report& report);
[[nodiscard]] std::optional<SchedulerConfig> build_scheduler(const Values& values, const Json& root, Report& report);

}  // namespace pannier::config
