// What a machine can do, as the few rates that the plan needs, and where each figure comes from.
#pragma once

#include <cstdint>

namespace pannier {

/// Memory traffic of one parameter's AdamW update in bf16: the gradient read; parameter, rest and moments read and
/// written. The host's rate is that of this update; one that moves more bytes is slower in proportion.
inline constexpr double kRatedUpdateNbytes = 26;

/// What a machine can do. A rate of 0 is not known: what uses it counts as taking no time.
struct LinkAndHostRates {
  double up = 0.0;                  ///< Bytes per second, host to device, when only that way is busy.
  double down = 0.0;                ///< Device to host, likewise.
  double up_both = 0.0;             ///< Host to device while both ways are busy; 0: as `up`.
  double down_both = 0.0;           ///< Device to host while both ways are busy; 0: as `down`.
  double down_beside_update = 0.0;  ///< Device to host while the host updates; 0: as `down`. Only ever observed.
  double dram = 0.0;                ///< Bytes per second of host memory, read and written together.
  double host_update = 0.0;  ///< Parameters per second of the host's update with all cores, at kRatedUpdateNbytes each.
  double device_copy = 0.0;  ///< Bytes per second of device memory, read and written together.
  void validate() const;     ///< Throws ConfigError for a rate that is negative or not finite.
};

/// Where a rate comes from.
enum class RateOrigin : std::uint8_t { kUnknown, kProbe, kCache, kGiven, kObserved };

/// For people: "not known", "probe", "cache", "given" or "observed".
[[nodiscard]] constexpr const char* to_string(RateOrigin origin) noexcept {
  switch (origin) {
    case RateOrigin::kUnknown:
      return "not known";
    case RateOrigin::kProbe:
      return "probe";
    case RateOrigin::kCache:
      return "cache";
    case RateOrigin::kGiven:
      return "given";
    case RateOrigin::kObserved:
      return "observed";
  }
  return "?";
}

}  // namespace pannier
