#include "pannier/zero/shard_gathering.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace pannier {
namespace {

at::Tensor part_of(const at::Tensor& flat, const Shard& shard) { return flat.narrow(0, shard.begin, shard.numel()); }

class FlatGathering final : public ShardGathering {
 public:
  FlatGathering(const ShardLayout& shards, ShardExchange& exchange, ParameterShards& rest)
      : shards_(shards), exchange_(exchange), rest_(rest) {}

  void raise(int bucket, const at::Tensor& flat) override { rest_.raise(bucket, part_of(flat, shards_.shard(bucket))); }
  [[nodiscard]] std::unique_ptr<PendingExchange> gather(int bucket, const at::Tensor& flat) override {
    rest_.finish_raise(bucket);
    return exchange_.gather(flat, bucket);
  }
  void store(int bucket, const at::Tensor& flat) override { rest_.store(bucket, part_of(flat, shards_.shard(bucket))); }
  void settle(int bucket) override { rest_.settle(bucket); }
  void expect_changes(int /*num_buckets*/) override {}

 private:
  const ShardLayout& shards_;
  ShardExchange& exchange_;
  ParameterShards& rest_;
};

// The exchange within the node, which carries on what the one between nodes found.
class SecondHalf final : public PendingExchange {
 public:
  SecondHalf(at::Tensor mismatch, std::unique_ptr<PendingExchange> exchange)
      : mismatch_(std::move(mismatch)), exchange_(std::move(exchange)) {}

  void wait() override { exchange_->wait(); }
  [[nodiscard]] at::Tensor mismatch() const override {
    const at::Tensor here = exchange_->mismatch();
    return mismatch_.defined() && here.defined() ? mismatch_.logical_or(here) : here.defined() ? here : mismatch_;
  }

 private:
  at::Tensor mismatch_;
  std::unique_ptr<PendingExchange> exchange_;
};

class NodeGathering final : public ShardGathering {
 public:
  NodeGathering(const ShardLayout& shards, ShardExchange& exchange, ParameterShards& rest,
                std::unique_ptr<ParameterShards> parts)
      : shards_(shards),
        exchange_(exchange),
        rest_(rest),
        parts_(std::move(parts)),
        is_current_(static_cast<std::size_t>(shards.buckets().num_buckets())) {}

  void raise(int bucket, const at::Tensor& flat) override {
    if (is_current(bucket)) {
      parts_->raise(bucket, part_of(flat, part(bucket)));
    } else {
      rest_.raise(bucket, part_of(flat, shards_.shard(bucket)));
    }
  }

  [[nodiscard]] std::unique_ptr<PendingExchange> gather(int bucket, const at::Tensor& flat) override {
    if (is_current(bucket)) {
      parts_->finish_raise(bucket);
      return exchange_.gather_in_node(flat, bucket);
    }
    rest_.finish_raise(bucket);
    const auto between = exchange_.gather_between_nodes(flat, bucket);
    between->wait();
    parts_->store(bucket, part_of(flat, part(bucket)));
    is_current_[static_cast<std::size_t>(bucket)] = true;
    return std::make_unique<SecondHalf>(between->mismatch(), exchange_.gather_in_node(flat, bucket));
  }

  void store(int bucket, const at::Tensor& flat) override {
    rest_.store(bucket, part_of(flat, shards_.shard(bucket)));
    parts_->store(bucket, part_of(flat, part(bucket)));
  }
  void settle(int bucket) override {
    rest_.settle(bucket);
    parts_->settle(bucket);
  }
  void expect_changes(int num_buckets) override { std::fill_n(is_current_.begin(), num_buckets, false); }

 private:
  [[nodiscard]] bool is_current(int bucket) const { return is_current_.at(static_cast<std::size_t>(bucket)); }
  [[nodiscard]] Shard part(int bucket) const { return shards_.node_part(bucket, shards_.rank()); }

  const ShardLayout& shards_;
  ShardExchange& exchange_;
  ParameterShards& rest_;
  std::unique_ptr<ParameterShards> parts_;
  std::vector<bool> is_current_;  ///< By bucket: whether the node's copy has what rests.
};

}  // namespace

std::unique_ptr<ShardGathering> make_flat_gathering(const ShardLayout& shards, ShardExchange& exchange,
                                                    ParameterShards& rest) {
  return std::make_unique<FlatGathering>(shards, exchange, rest);
}

std::unique_ptr<ShardGathering> make_node_gathering(const ShardLayout& shards, ShardExchange& exchange,
                                                    ParameterShards& rest, std::unique_ptr<ParameterShards> parts) {
  return std::make_unique<NodeGathering>(shards, exchange, rest, std::move(parts));
}

}  // namespace pannier
