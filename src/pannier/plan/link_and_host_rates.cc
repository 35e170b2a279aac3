#include "pannier/plan/link_and_host_rates.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {

void LinkAndHostRates::validate() const {
  for (const auto& [name, rate] : {std::pair<const char*, double>{"up", up},
                                   {"down", down},
                                   {"up_both", up_both},
                                   {"down_both", down_both},
                                   {"down_beside_update", down_beside_update},
                                   {"dram", dram},
                                   {"host_update", host_update},
                                   {"device_copy", device_copy}}) {
    if (!(std::isfinite(rate) && rate >= 0.0)) {
      throw ConfigError(fmt::format("rate {} must be finite and not negative, got {}", name, rate));
    }
  }
}

}  // namespace pannier
