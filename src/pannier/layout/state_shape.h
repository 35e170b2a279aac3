// How many bytes each element of a shard keeps, and where: the table of docs/architecture.md as numbers.
#pragma once

#include <cstddef>

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
  /// Bytes of optimizer state on the host per element. The parameter is there too, since the update happens there.
  [[nodiscard]] constexpr std::size_t host_nbytes(Home home) const noexcept {
    return home == Home::kHost ? param_nbytes + rest_nbytes + 4 * static_cast<std::size_t>(num_states) : 0;
  }
};

}  // namespace pannier
