#include "pannier/zero/gradient_sharing.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <map>

#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

const std::vector<std::int64_t> kNumels{5, 2 * kBlockNumel + 3, 9};

// What a rank's backward gives of a parameter; numbers whose fp32 sums are exact.
at::Tensor gradient_of(int rank, int parameter, std::int64_t micro) {
  return at::arange(kNumels[static_cast<std::size_t>(parameter)], at::kFloat) * (rank + 1) + static_cast<double>(micro);
}

class GradientSharingTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  // Runs one window of `num_micros` on each rank and checks what is delivered.
  static void run_window(int world_size, bool sums_first, std::int64_t num_micros, std::int64_t bucket_numel) {
    testing::run_ranks(world_size, [=](Communicator& communicator) {
      const BucketLayout layout(kNumels, {.bucket_numel = bucket_numel});
      const ShardLayout shards(layout, communicator.rank(), communicator.world_size());
      ShardExchange exchange(shards, communicator);
      const auto device = make_metered_cpu();
      std::map<int, at::Tensor> sums;
      const auto sharing = make_rank_sharing({*device, shards, exchange, at::kFloat}, sums_first,
                                             [&](int /*bucket*/, std::vector<FlatGradient> gradients, bool /*last*/) {
                                               for (const FlatGradient& gradient : gradients) {
                                                 at::Tensor& sum = sums[gradient.parameter];
                                                 sum = sum.defined() ? sum + gradient.values : gradient.values;
                                               }
                                             });
      for (std::int64_t micro = 0; micro < num_micros; ++micro) {
        for (int b = 0; b < layout.num_buckets(); ++b) {
          std::vector<FlatGradient> gradients;
          for (const Segment& segment : layout.buckets()[static_cast<std::size_t>(b)].segments) {
            if (segment.parameter != 2 || communicator.rank() == 0) {  // Parameter 2 is used by rank 0 alone.
              gradients.push_back({segment.parameter, gradient_of(communicator.rank(), segment.parameter, micro)});
            }
          }
          sharing->take(b, std::move(gradients), micro + 1 == num_micros);
        }
        sharing->finish();
      }
      for (int p = 0; p < layout.num_parameters(); ++p) {
        const ShardPiece& piece = shards.piece_of(p);
        if (piece.numel == 0) {
          continue;
        }
        at::Tensor expected = at::zeros({kNumels[static_cast<std::size_t>(p)]});
        for (std::int64_t micro = 0; micro < num_micros; ++micro) {
          for (int r = 0; r < (p == 2 ? 1 : world_size); ++r) {
            expected += gradient_of(r, p, micro);
          }
        }
        ASSERT_TRUE(sums[p].defined());
        EXPECT_TRUE(at::equal(sums[p], expected.narrow(0, piece.parameter_offset, piece.numel)));
      }
    });
  }
};

TEST_P(GradientSharingTest, EachRankGetsTheSumsOfItsPieces) {
  const auto [world_size, sums_first] = GetParam();
  for (const std::int64_t num_micros : {1, 3}) {
    for (const std::int64_t bucket_numel : {std::int64_t{1}, std::int64_t{1} << 20}) {
      run_window(world_size, sums_first, num_micros, bucket_numel);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GradientSharingTest, ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Bool()));

TEST(GradientSharing, AloneEverythingIsDeliveredAsItIs) {
  std::vector<int> delivered;
  const auto sharing = make_solo_sharing([&](int bucket, std::vector<FlatGradient> gradients, bool last) {
    EXPECT_TRUE(last);
    EXPECT_EQ(gradients.size(), 1U);
    delivered.push_back(bucket);
  });
  EXPECT_FALSE(sharing->in_order());
  sharing->hold(true);  // Alone there is nothing to wait for.
  sharing->take(1, {{0, at::ones({5})}}, true);
  sharing->take(0, {{1, at::ones({5})}}, true);
  EXPECT_THAT(delivered, ::testing::ElementsAre(1, 0));
}

}  // namespace
}  // namespace pannier
