#include "pannier/comm/shard_exchange.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>

#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

// Two buckets: one that is cut inside a parameter, one that only the last rank owns anything of.
const std::vector<std::int64_t> kNumels{100, 3 * kBlockNumel + 1, 9};

class ShardExchangeTest : public ::testing::TestWithParam<int> {};

TEST_P(ShardExchangeTest, GathersEveryShardIntoItsPlace) {
  testing::run_ranks(GetParam(), [](Communicator& communicator) {
    const BucketLayout layout(kNumels, {.bucket_numel = 4 * kBlockNumel});
    const ShardLayout shards(layout, communicator.rank(), communicator.world_size());
    ShardExchange exchange(shards, communicator);
    for (int b = 0; b < layout.num_buckets(); ++b) {
      const std::int64_t numel = layout.buckets()[static_cast<std::size_t>(b)].numel;
      const at::Tensor whole = at::arange(numel, at::kFloat);
      const at::Tensor flat = at::full({numel}, -1.0F);
      const Shard& mine = shards.shard(b);
      flat.narrow(0, mine.begin, mine.numel()).copy_(whole.narrow(0, mine.begin, mine.numel()));
      exchange.gather(flat, b)->wait();
      for (int r = 0; r < shards.world_size(); ++r) {
        for (const Piece& piece : shards.shard(b, r).pieces) {
          EXPECT_TRUE(at::equal(flat.narrow(0, piece.bucket_offset, piece.numel),
                                whole.narrow(0, piece.bucket_offset, piece.numel)));
        }
      }
    }
  });
}

TEST_P(ShardExchangeTest, ScattersToEveryRankWhatAllHaveOfItsShard) {
  testing::run_ranks(GetParam(), [](Communicator& communicator) {
    const BucketLayout layout(kNumels, {.bucket_numel = 4 * kBlockNumel});
    const ShardLayout shards(layout, communicator.rank(), communicator.world_size());
    ShardExchange exchange(shards, communicator);
    for (int b = 0; b < layout.num_buckets(); ++b) {
      const std::int64_t numel = layout.buckets()[static_cast<std::size_t>(b)].numel;
      const auto of_rank = [numel](int rank) { return at::arange(numel, at::kFloat) + 1000.0 * rank; };
      const auto scattered = exchange.scatter(of_rank(communicator.rank()), b);
      scattered.pending->wait();
      ASSERT_EQ(scattered.parts.size(), static_cast<std::size_t>(shards.world_size()));
      const Shard& mine = shards.shard(b);
      for (int r = 0; r < shards.world_size(); ++r) {
        EXPECT_TRUE(
            at::equal(scattered.parts[static_cast<std::size_t>(r)], of_rank(r).narrow(0, mine.begin, mine.numel())));
      }
    }
  });
}

TEST_P(ShardExchangeTest, CompletesAParameterFromItsPieces) {
  testing::run_ranks(GetParam(), [](Communicator& communicator) {
    const BucketLayout layout(kNumels, {.bucket_numel = 4 * kBlockNumel});
    const ShardLayout shards(layout, communicator.rank(), communicator.world_size());
    ShardExchange exchange(shards, communicator);
    for (int p = 0; p < layout.num_parameters(); ++p) {
      const at::Tensor whole = at::arange(kNumels[static_cast<std::size_t>(p)], at::kFloat);
      const at::Tensor flat = at::full_like(whole, -1.0F);
      const ShardPiece& piece = shards.piece_of(p);
      flat.narrow(0, piece.parameter_offset, piece.numel).copy_(whole.narrow(0, piece.parameter_offset, piece.numel));
      exchange.gather_parameter(flat, p, 0);
      EXPECT_TRUE(at::equal(flat, whole));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardExchangeTest, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace pannier
