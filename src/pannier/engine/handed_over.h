// What an engine leaves of partitioned parameters when it ends: each rank its pieces, in their own type, for who goes
// on with the model. Nothing is exchanged, since ranks let go of their engines at different times.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "pannier/zero/build_parts.h"

namespace pannier {

/// This rank's piece of a partitioned parameter. Ranks' pieces cover it; they may be the same on several.
struct HandedOver {
  std::int64_t parameter = 0;  ///< As the engine's caller counts them.
  std::int64_t begin = 0;      ///< The first element, in the parameter's own order in memory.
  at::Tensor values;           ///< Flat, where it rested: on the device, or on the CPU. May be empty.
};

/// The pieces of all partitioned parameters, which rest. `managed_of`: the caller's index to the one in the parts; -1:
/// in none of their buckets. Nothing where parameters rest on a disk, whose room the host may not have. Throws
/// OutOfMemoryError.
[[nodiscard]] std::vector<HandedOver> hand_over(Parts& parts, const std::vector<int>& managed_of);

}  // namespace pannier
