#include "pannier/plan/rate_correction.h"

#include <algorithm>
#include <cmath>

namespace pannier {
namespace {

constexpr double kWeight = 0.25;
constexpr double kMostFactor = 4.0;

double corrected(double rate, const ObservedWork& work) {
  const double seen = work.amount > 0.0 && work.seconds > 0.0 ? work.amount / work.seconds : 0.0;
  if (!(std::isfinite(seen) && seen > 0.0)) {
    return rate;
  }
  return rate > 0.0 ? rate + kWeight * (std::clamp(seen, rate / kMostFactor, rate * kMostFactor) - rate) : seen;
}

}  // namespace

LinkAndHostRates correct(const LinkAndHostRates& rates, const ObservedRates& observed) {
  return {.up = corrected(rates.up, observed.up),
          .down = corrected(rates.down, observed.down),
          .up_both = corrected(rates.up_both, observed.up_both),
          .down_both = corrected(rates.down_both, observed.down_both),
          .down_beside_update = corrected(rates.down_beside_update, observed.down_beside_update),
          .dram = corrected(rates.dram, observed.dram),
          .host_update = corrected(rates.host_update, observed.host_update),
          .device_copy = corrected(rates.device_copy, observed.device_copy)};
}

}  // namespace pannier
