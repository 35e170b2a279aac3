// Observed times correct the probed rates, so that the split can be solved again for the machine as it is in training.
#pragma once

#include "pannier/plan/link_and_host_rates.h"

namespace pannier {

/// Work that was seen done: bytes, or parameters for the host's update. Nothing was seen where either is 0.
struct ObservedWork {
  double amount = 0.0;
  double seconds = 0.0;
};

/// What was seen of each rate of LinkAndHostRates.
struct ObservedRates {
  ObservedWork up{};
  ObservedWork down{};
  ObservedWork up_both{};
  ObservedWork down_both{};
  ObservedWork down_beside_update{};
  ObservedWork dram{};
  ObservedWork host_update{};
  ObservedWork device_copy{};
};

/// Moves each rate a quarter of the way to what was observed, which counts as at most four times above or below it; so
/// one odd step never turns the plan over, and a lasting change is followed within some ten steps. An unknown rate
/// takes the observed value. What is zero, negative or not finite is ignored.
[[nodiscard]] LinkAndHostRates correct(const LinkAndHostRates& rates, const ObservedRates& observed);

}  // namespace pannier
