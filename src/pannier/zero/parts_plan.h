// What the options of an engine mean in numbers, before anything is built: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "pannier/layout/state_shape.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// The bytes of each element's state.
[[nodiscard]] StateShape shape_of(const PartsOptions& options);

/// Whether ranks have something to partition, or parameters a home to go to.
[[nodiscard]] bool shards_parameters(const PartsOptions& options, int world_size);

/// Ranks of a node: all of them, unless parameters are partitioned and nodes keep copies.
[[nodiscard]] int node_size_of(const PartsOptions& options, int world_size);

/// The group of each parameter that its bucket must not leave, for BucketLayout; empty: all are one.
[[nodiscard]] std::vector<int> groups_of(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                                         int world_size);

/// Elements of each bucket that this rank keeps for its node, beside its own shard; empty: all ranks are one node.
[[nodiscard]] std::vector<std::int64_t> node_numels_of(const ShardLayout& shards);

}  // namespace pannier
