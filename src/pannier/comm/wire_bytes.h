// Bytes that a rank has sent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "pannier/comm/label.h"

namespace pannier {

/// Counts since the group was made. Payloads are counted as they travel: padded to 16 bytes if a stamp follows.
struct WireBytes {
  using Counts = std::array<std::int64_t, kNumOperationKinds>;
  Counts payload{};   ///< By OperationKind.
  Counts overhead{};  ///< Stamps and headers, by OperationKind.

  [[nodiscard]] std::int64_t payload_of(OperationKind kind) const { return payload.at(static_cast<std::size_t>(kind)); }
  [[nodiscard]] std::int64_t overhead_of(OperationKind kind) const {
    return overhead.at(static_cast<std::size_t>(kind));
  }
  [[nodiscard]] std::int64_t total() const {
    return std::accumulate(payload.begin(), payload.end(),
                           std::accumulate(overhead.begin(), overhead.end(), std::int64_t{0}));
  }
};

}  // namespace pannier
