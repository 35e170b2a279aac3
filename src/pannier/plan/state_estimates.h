// Rules of thumb for what model states need, by the formulas that DeepSpeed prints, so that numbers people know come
// out. The plan (memory_plan.h) is the exact account.
#pragma once

#include <cstdint>

namespace pannier {

/// What is asked about: a model in 16-bit types with Adam.
struct StateEstimateInput {
  std::int64_t numel = 0;                ///< Elements of all parameters, tied ones once.
  std::int64_t largest_layer_numel = 0;  ///< Stage 3: elements of the largest module.
  int gpus_per_node = 1;
  int nodes = 1;
  bool offloads_optimizer = true;
  bool offloads_parameters = false;  ///< Stage 3.
  bool built_in_shards = true;       ///< Stage 3: no rank ever holds the whole model.
  double buffer_factor = 1.5;        ///< On host memory.

  /// Throws ConfigError for what can't be.
  void validate() const;
};

/// Bytes on a node's host and on each GPU.
struct StateEstimate {
  double host_bytes = 0;
  double device_bytes = 0;
};

/// ZeRO stage 2: 16-bit parameters whole on each GPU.
[[nodiscard]] StateEstimate estimate_stage_2(const StateEstimateInput& input);

/// ZeRO stage 3: everything in shards, one layer whole at a time.
[[nodiscard]] StateEstimate estimate_stage_3(const StateEstimateInput& input);

}  // namespace pannier
