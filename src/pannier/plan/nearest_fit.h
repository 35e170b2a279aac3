// What to change when a plan does not fit: the least change, first among those that keep the training's numbers.
#pragma once

#include <string>
#include <vector>

#include "pannier/plan/memory_plan.h"

namespace pannier {

/// A plan near one that was asked for.
struct NearestFit {
  MemoryPlanInput input;  ///< As it would be.
  std::vector<std::string>
      changes;        ///< Keys of the configuration with their new values; empty when `input` fits as it is.
  bool fits = false;  ///< false: nothing fits, and `input` takes the least device memory there is.
};

/// Tries, in this order, the other home of optimizer states, a smaller micro-batch (where its size and activations are
/// known; more of them make the same batch), both, and each of them with a single micro-batch a step, whose gradients
/// need no fp32 sum.
[[nodiscard]] NearestFit find_nearest_fit(const MemoryPlanInput& input, const MemoryBudget& budget);

/// A clause for people: what to set and what it takes, or the least that can train the model.
[[nodiscard]] std::string describe(const NearestFit& nearest);

}  // namespace pannier
