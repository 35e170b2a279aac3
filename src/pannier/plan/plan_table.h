// The whole plan as text for people: memory by owner and tier, the way each bucket's update takes, the seconds that a
// step is expected to take and what binds them, and the rates that this rests on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pannier/plan/link_and_host_rates.h"
#include "pannier/plan/memory_plan.h"
#include "pannier/plan/time_model.h"
#include "pannier/plan/update_route.h"

namespace pannier {

/// Where each rate comes from; one figure for the four rates of the link.
struct RateOrigins {
  RateOrigin link = RateOrigin::kUnknown;
  RateOrigin dram = RateOrigin::kUnknown;
  RateOrigin host_update = RateOrigin::kUnknown;
  RateOrigin device_copy = RateOrigin::kUnknown;
};

/// What the table shows. Parts that are empty are left out.
struct PlanTable {
  MemoryPlan memory;
  Home optimizer_home = Home::kDevice;
  std::optional<std::size_t> activations_nbytes{};  ///< Their measured peak, after a step.
  std::vector<std::int64_t> bucket_numels{};
  std::vector<UpdateRoute> routes{};  ///< One a bucket.
  std::optional<SplitPlan> split{};   ///< Where states rest on the host.
  StepObservation observation{};      ///< Of one micro-batch.
  std::int64_t micro_batches = 1;
  LinkAndHostRates rates{};
  RateOrigins origins{};
};

/// Renders the table, several sections with a heading each.
[[nodiscard]] std::string format_plan_table(const PlanTable& table);

/// The sections on their own.
[[nodiscard]] std::string format_routes(const PlanTable& table);
[[nodiscard]] std::string format_times(const PlanTable& table);
[[nodiscard]] std::string format_rates(const LinkAndHostRates& rates, const RateOrigins& origins);

}  // namespace pannier
