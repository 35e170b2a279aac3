#include "pannier/plan/update_route.h"

#include <fmt/format.h>

#include <numeric>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// Shares come from divisions: one that is 1 up to rounding is 1.
constexpr double kRounding = 1e-9;

}  // namespace

void RouteShares::validate() const {
  if (!(device >= 0.0 && host >= 0.0 && device + host <= 1.0 + kRounding)) {
    throw ConfigError(fmt::format("shares must lie within 0 and 1 together, got device {} and host {}", device, host));
  }
  if (most_streamed_numel < 0) {
    throw ConfigError(fmt::format("most_streamed_numel must not be negative, got {}", most_streamed_numel));
  }
}

// The first buckets of backward go to the host, for three reasons. Their gradients arrive while the rest of backward
// still runs, so that the copy down is over, and its device memory free, when backward ends and the host may begin.
// Their up link is not yet wanted by streamed states, which wait for the room that activations leave. And they are the
// last that a forward reaches, so that an update which runs on into the next forward has the most time. What stays on
// the device is the opposite end: it is updated at once, where the next forward begins.
std::vector<UpdateRoute> assign_routes(std::span<const std::int64_t> bucket_numels, const RouteShares& shares) {
  shares.validate();
  const auto total = std::accumulate(bucket_numels.begin(), bucket_numels.end(), std::int64_t{0});
  std::vector<UpdateRoute> routes(bucket_numels.size(), UpdateRoute::kStreamed);
  const double device_target = shares.device * static_cast<double>(total) * (1.0 + kRounding);
  std::size_t device_begin = routes.size();
  std::int64_t on_device = 0;
  while (device_begin > 0 && shares.device > 0.0 &&
         static_cast<double>(on_device + bucket_numels[device_begin - 1]) <= device_target) {
    on_device += bucket_numels[--device_begin];
    routes[device_begin] = UpdateRoute::kDevice;
  }
  const double host_target = shares.host * static_cast<double>(total);
  std::int64_t on_host = 0;
  for (std::size_t i = 0; i < device_begin; ++i) {
    const bool nearer_with_it =
        shares.host > 0.0 && static_cast<double>(on_host) + static_cast<double>(bucket_numels[i]) / 2 <= host_target;
    if (!nearer_with_it && total - on_device - on_host <= shares.most_streamed_numel) {
      break;
    }
    on_host += bucket_numels[i];
    routes[i] = UpdateRoute::kHost;
  }
  return routes;
}

}  // namespace pannier
