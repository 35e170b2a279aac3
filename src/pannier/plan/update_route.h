// Which way each bucket's update takes, and how a split in shares becomes a list of buckets.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace pannier {

/// How a shard is updated: its states rest on the device; or they rest on the host, travel to the device, are updated
/// there and travel back; or the gradient travels to the host and the update runs there.
enum class UpdateRoute : std::uint8_t { kDevice, kStreamed, kHost };

/// The route's name: "device", "streamed" or "host".
[[nodiscard]] constexpr const char* to_string(UpdateRoute route) noexcept {
  switch (route) {
    case UpdateRoute::kDevice:
      return "device";
    case UpdateRoute::kStreamed:
      return "streamed";
    case UpdateRoute::kHost:
      return "host";
  }
  return "?";
}

/// Parts of all elements; what is neither is streamed.
struct RouteShares {
  double device = 0.0;  ///< At most this much rests on the device.
  double host = 0.0;    ///< To the nearest bucket.
  /// More than this is never streamed: buckets that rounding left above it go to the host.
  std::int64_t most_streamed_numel = std::numeric_limits<std::int64_t>::max();
  void validate() const;  ///< Throws ConfigError unless shares lie within [0, 1] and their sum too.
};

/// Chooses the route of each bucket; `bucket_numels` is in backward order. The first buckets go to the host, the last
/// stay on the device. Empty buckets follow their neighbours.
[[nodiscard]] std::vector<UpdateRoute> assign_routes(std::span<const std::int64_t> bucket_numels,
                                                     const RouteShares& shares);

}  // namespace pannier
