// Route: how a bucket is updated.
#pragma once

#include <cstdint>

namespace pannier {

/// kDevice: states rest on the device and are updated there. kStreamed: they rest on the host, travel to the device,
/// are updated there and travel back. kHost: the gradient travels to the host, where a SIMD kernel updates, and the new
/// parameter travels back.
enum class UpdateRoute : std::uint8_t { kDevice, kStreamed, kHost };

/// "device", "streamed" or "host".
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

}  // namespace pannier
