// The part of `pannier plan` that speaks of time: flags that describe a machine, and the table that follows from them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "pannier/engine/config.h"
#include "pannier/plan/memory_plan.h"
#include "pannier/plan/plan_table.h"

namespace pannier::cli {

/// What the machine can do, in the units of data sheets; 0: not given.
struct TimeFlags {
  double pcie = 0;         ///< GB/s each way.
  double dram = 0;         ///< GB/s.
  double cores_rate = 0;   ///< G parameters/s.
  double hbm = 0;          ///< GB/s.
  double tokens = 0;       ///< A step.
  double tflops = 0;       ///< That training reaches, not the data sheet's.
  double forward_ms = 0;   ///< Of a micro-batch.
  double backward_ms = 0;  ///< Of a micro-batch.
  bool recompute = false;
  bool overlap_step = false;
};

void add_time_flags(CLI::App& command, TimeFlags& flags);

/// Plans the step. Rates that are not given are this machine's, measured once and kept in the user's cache.
[[nodiscard]] PlanTable plan_times(const Config& config, const MemoryPlanInput& input, const MemoryBudget& budget,
                                   const TimeFlags& flags);

}  // namespace pannier::cli
