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

/// The buckets of the parameters that are trained: of all but the last ones, whose types `options` has.
[[nodiscard]] BucketLayout trained_layout(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                                          int world_size);

/// The same, and after them those of the frozen ones, each of which holds one type.
[[nodiscard]] BucketLayout model_layout(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                                        int world_size);

/// What rests of each bucket, given what a rank keeps of it: elements of its type, none of one that stays whole.
[[nodiscard]] std::vector<RestingShard> resting_shards(const PartsOptions& options, const BucketLayout& layout,
                                                       std::vector<std::int64_t> numels);

/// Elements of each bucket that this rank keeps for its node, beside its own shard; empty: all ranks are one node.
[[nodiscard]] std::vector<std::int64_t> node_numels_of(const ShardLayout& shards);

}  // namespace pannier
