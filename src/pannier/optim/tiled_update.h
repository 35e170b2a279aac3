// An update and the checks of what it works on, in one pass: bytes that came from a disk are hashed when they are in a
// core's cache for the update anyway, and again when they have been updated.
#pragma once

#include <vector>

#include "pannier/kernels/update.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// How a chunk's update is run.
struct TiledUpdateOptions {
  kernels::Algorithm algorithm = kernels::Algorithm::kAdamW;
  kernels::StateFormat format = kernels::StateFormat::kFp32;
  int most_threads = 1;
};

/// Runs the tasks of a chunk that `states`, whose tile_numel() is not 0, leases with kTiles, and confirms it. `tasks`
/// are in the order of their elements. The same bits as kernels::update_all. Returns the sum afterwards. Throws
/// ChecksumError: what the tasks wrote must not be used then.
std::uint64_t update_in_tiles(StateStore& states, const Lease& lease, const std::vector<kernels::UpdateTask>& tasks,
                              float grad_factor, const TiledUpdateOptions& options);

}  // namespace pannier
