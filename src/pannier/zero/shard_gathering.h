// Where a gather takes a bucket's shards from. Without nodes every rank sends its shard to all others each time. Where
// ranks form nodes, each node keeps a copy of the parameters in parts: after a step ranks that keep the same part of
// different nodes tell each other what is new in it, once, and every gather until the next step stays within the node.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "pannier/comm/shard_exchange.h"
#include "pannier/tier/parameter_shards.h"

namespace pannier {

/// Brings a bucket's shards together in a flat tensor that has the bucket's layout. All ranks make the same calls of
/// gather() in the same order.
class ShardGathering {
 public:
  ShardGathering() = default;
  virtual ~ShardGathering() = default;
  ShardGathering(const ShardGathering&) = delete;
  ShardGathering& operator=(const ShardGathering&) = delete;

  /// What this rank sends sets out for its place in `flat`, which must stay until settle() or what comes after the
  /// gather has run. One a bucket at a time.
  virtual void raise(int bucket, const at::Tensor& flat) = 0;
  /// Exchanges what ranks raised; `flat` is whole after the wait. Throws CollectiveError.
  [[nodiscard]] virtual std::unique_ptr<PendingExchange> gather(int bucket, const at::Tensor& flat) = 0;
  /// The values of a whole bucket become what rests.
  virtual void store(int bucket, const at::Tensor& flat) = 0;
  /// The host waits until no copy is under way.
  virtual void settle(int bucket) = 0;
  /// From here on what rests of the first so many buckets may change without a store(). All ranks call it.
  virtual void expect_changes(int num_buckets) = 0;
};

/// Of all ranks. What it refers to must outlive it.
[[nodiscard]] std::unique_ptr<ShardGathering> make_flat_gathering(const ShardLayout& shards, ShardExchange& exchange,
                                                                  ParameterShards& rest);

/// Of a node's ranks, from `parts`: shards of the size of this rank's part of its node's copy.
[[nodiscard]] std::unique_ptr<ShardGathering> make_node_gathering(const ShardLayout& shards, ShardExchange& exchange,
                                                                  ParameterShards& rest,
                                                                  std::unique_ptr<ParameterShards> parts);

}  // namespace pannier
