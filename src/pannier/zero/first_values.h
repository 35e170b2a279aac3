// The values that parameters begin with: rank 0's, wherever they come from.
#pragma once

#include <ATen/core/Tensor.h>

#include "pannier/zero/build_parts.h"

namespace pannier {

/// What the ranks' shares of a parameter are together, padding included, on the device; undefined where `share` is. All
/// ranks call it.
[[nodiscard]] at::Tensor joined_shares(Communicator& communicator, Device& device, const at::Tensor& share);

/// Moves frozen parameters into their buckets, one bucket after the other, each of which then rests where parameters
/// do. All ranks call it.
void place_frozen(Parts& parts, Communicator& communicator);

}  // namespace pannier
