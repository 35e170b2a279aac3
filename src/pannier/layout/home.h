// Home: where a piece of training state rests between uses.
#pragma once

#include <cstdint>

namespace pannier {

/// Where a piece of state rests: device memory, host memory, or a file on an NVMe disk.
enum class Home : std::uint8_t { kDevice, kHost, kNvme };

/// The home's name as the configuration writes it: "none", "cpu" or "nvme".
[[nodiscard]] constexpr const char* to_string(Home home) noexcept {
  switch (home) {
    case Home::kDevice:
      return "none";
    case Home::kHost:
      return "cpu";
    case Home::kNvme:
      return "nvme";
  }
  return "?";
}

}  // namespace pannier
