// How many bytes each element of a shard keeps, and where: the table of docs/architecture.md as numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "pannier/base/units.h"
#include "pannier/layout/home.h"

namespace pannier {

/// Bytes per element of one shard's training state.
struct StateShape {
  std::size_t param_nbytes = 4;  ///< The parameter on the device: 4 (fp32) or 2 (fp16, bf16).
  std::size_t rest_nbytes = 0;   ///< Beside it: 4 (fp32 master of fp16), 2 (`lo` of bf16), 0 (fp32).
  int num_states = 2;            ///< fp32 states of the optimizer, 0 to 2.

  /// Bytes of optimizer state on the device per element: nothing of it where the home is the host.
  [[nodiscard]] constexpr std::size_t device_nbytes(Home home) const noexcept {
    return home == Home::kDevice ? rest_nbytes + 4 * static_cast<std::size_t>(num_states) : 0;
  }
};

/// Where the host keeps the arrays of one bucket, in bytes from the bucket's start: state1, state2, rest, parameter.
struct HostBucketLayout {
  std::array<std::size_t, 4> offsets{};
  std::size_t nbytes = 0;  ///< Of the whole bucket.
};

/// Lays the arrays of a bucket of `numel` elements one after the other. Arrays of some MiB are set apart by a few KiB,
/// since streams whose distance is a power of two fall on the same DRAM banks and halve the update's speed.
[[nodiscard]] constexpr HostBucketLayout host_bucket_layout(const StateShape& shape, std::int64_t numel) noexcept {
  constexpr std::int64_t kLargeNumel = std::int64_t{1} << 20;
  constexpr std::size_t kGapNbytes = std::size_t{8} << 10;
  const std::array<std::size_t, 4> widths{shape.num_states < 1 ? 0U : 4U, shape.num_states < 2 ? 0U : 4U,
                                          shape.rest_nbytes, shape.param_nbytes};
  HostBucketLayout layout;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    layout.offsets[i] = layout.nbytes;
    layout.nbytes += nbytes_of(numel, widths[i]) + (numel >= kLargeNumel && widths[i] > 0 ? kGapNbytes : 0);
  }
  return layout;
}

}  // namespace pannier
