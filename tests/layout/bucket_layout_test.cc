#include "pannier/layout/bucket_layout.h"

#include <gmock/gmock.h>

#include <random>

#include "pannier/base/error.h"
#include "pannier/layout/shard_layout.h"

namespace pannier {
namespace {

TEST(BucketLayout, KeepsBackwardOrderAndAlignment) {
  const std::vector<std::int64_t> numels{10, 0, 5000, 1, 64};
  const BucketLayout layout(numels, {.bucket_numel = 5100});
  ASSERT_EQ(layout.num_buckets(), 2);
  EXPECT_EQ(layout.buckets()[0].segments[0].parameter, 4);
  EXPECT_EQ(layout.buckets()[0].segments[1].parameter, 3);
  EXPECT_EQ(layout.buckets()[0].segments[1].offset, 64);
  EXPECT_EQ(layout.buckets()[0].numel, 128);
  EXPECT_EQ(layout.bucket_of(2), 1);
  EXPECT_EQ(layout.segment_of(0).offset, 5056);
  EXPECT_EQ(layout.segment_of(1).numel, 0);
  EXPECT_EQ(layout.numel(), 128 + 5056 + 64);
}

TEST(BucketLayout, GivesAParameterLargerThanABucketItsOwn) {
  const std::vector<std::int64_t> numels{100, 7, 100};
  const BucketLayout layout(numels, {.bucket_numel = 1});
  EXPECT_EQ(layout.num_buckets(), 3);
}

TEST(BucketLayout, NeverMixesGroupsAndPutsTheLastGroupLast) {
  const std::vector<std::int64_t> numels{10, 20, 30, 40, 50};
  const std::vector<int> groups{1, kLastGroup, 2, 1, kLastGroup};
  const BucketLayout layout(numels, {.bucket_numel = 1000}, groups);
  ASSERT_EQ(layout.num_buckets(), 3);
  EXPECT_EQ(layout.bucket_of(3), 0);
  EXPECT_EQ(layout.bucket_of(0), 0);  // Of the same group, though another one's parameter lies between.
  EXPECT_EQ(layout.bucket_of(2), 1);
  EXPECT_EQ(layout.bucket_of(4), 2);
  EXPECT_EQ(layout.bucket_of(1), 2);
  EXPECT_EQ(layout.group_of(0), 1);
  EXPECT_EQ(layout.group_of(1), 2);
  EXPECT_EQ(layout.group_of(2), kLastGroup);
  EXPECT_EQ(layout.segment_of(0).offset, 64);
}

TEST(BucketLayout, FurtherParametersComeInBucketsOfTheirOwn) {
  const std::vector<std::int64_t> numels{10, 20, 30};
  const std::vector<int> groups{1, kLastGroup, 2};
  const BucketLayout first(numels, {}, groups);
  const BucketLayout all =
      first.followed_by(std::vector<std::int64_t>{40, 50, 60}, {}, std::vector<int>{1, 1, kLastGroup});
  ASSERT_EQ(all.num_parameters(), 6);
  ASSERT_EQ(all.num_buckets(), first.num_buckets() + 2);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(all.bucket_of(i), first.bucket_of(i));
    EXPECT_EQ(all.segment_of(i).offset, first.segment_of(i).offset);
  }
  EXPECT_EQ(all.bucket_of(3), 3);  // Not with those of its group that were there before.
  EXPECT_EQ(all.bucket_of(4), 3);
  EXPECT_EQ(all.segment_of(4).parameter, 4);
  EXPECT_EQ(all.bucket_of(5), 4);
  EXPECT_EQ(all.group_of(3), 1);
  EXPECT_EQ(all.group_of(4), kLastGroup);
}

TEST(BucketLayout, AcceptsNoParameters) {
  const BucketLayout layout({}, {});
  EXPECT_EQ(layout.num_buckets(), 0);
  EXPECT_EQ(layout.numel(), 0);
}

TEST(BucketLayout, RefusesABucketOfNothing) {
  EXPECT_THROW(BucketLayout({}, {.bucket_numel = 0}), ConfigError);
  const std::vector<std::int64_t> negative{-1};
  EXPECT_THROW(BucketLayout(negative, {}), InternalError);
}

TEST(ShardLayout, CoversEveryElementOnce) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> numels(random() % 6);
    for (auto& numel : numels) {
      numel = static_cast<std::int64_t>(random() % (random() % 2 == 0 ? 10 : 20000));
    }
    const BucketLayout layout(numels, {.bucket_numel = static_cast<std::int64_t>(1 + random() % 30000)});
    const int world_size = static_cast<int>(1 + random() % 9);
    std::vector<std::vector<int>> owners(numels.size());
    for (std::size_t i = 0; i < numels.size(); ++i) {
      owners[i].assign(static_cast<std::size_t>(numels[i]), 0);
    }
    for (const auto& bucket : layout.buckets()) {
      std::int64_t end = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const Shard shard = shard_of(bucket, rank, world_size);
        if (shard.pieces.empty()) {
          EXPECT_EQ(shard.numel(), 0);
          continue;
        }
        EXPECT_GE(shard.begin, end);
        EXPECT_EQ(shard.begin % kSegmentAlignment, 0);
        end = shard.end;
        for (const auto& piece : shard.pieces) {
          EXPECT_EQ(piece.parameter_offset % kBlockNumel, 0);
          EXPECT_EQ(piece.bucket_offset, layout.segment_of(piece.parameter).offset + piece.parameter_offset);
          EXPECT_GE(piece.bucket_offset, shard.begin);
          EXPECT_LE(piece.bucket_offset + piece.numel, shard.end);
          for (std::int64_t i = 0; i < piece.numel; ++i) {
            ++owners[static_cast<std::size_t>(piece.parameter)][static_cast<std::size_t>(piece.parameter_offset + i)];
          }
        }
      }
      EXPECT_LE(end, bucket.numel);
    }
    for (const auto& owner : owners) {
      EXPECT_THAT(owner, testing::Each(1));
    }
  }
}

TEST(ShardLayout, OneRankOwnsTheWholeBucket) {
  const std::vector<std::int64_t> numels{5, 4097, 12};
  const BucketLayout layout(numels, {});
  const Shard shard = shard_of(layout.buckets()[0], 0, 1);
  EXPECT_EQ(shard.begin, 0);
  EXPECT_EQ(shard.end, layout.buckets()[0].numel);
  EXPECT_EQ(shard.pieces.size(), 3U);
}

TEST(ShardLayout, KnowsEveryPieceOfEveryRank) {
  const std::vector<std::int64_t> numels{3 * kBlockNumel + 5, 0, 7, kBlockNumel};
  const BucketLayout layout(numels, {.bucket_numel = 5 * kBlockNumel});
  std::vector<std::int64_t> owned(numels.size());
  for (int rank = 0; rank < 3; ++rank) {
    const ShardLayout shards(layout, rank, 3);
    for (int b = 0; b < layout.num_buckets(); ++b) {
      EXPECT_EQ(shards.numels()[static_cast<std::size_t>(b)], shards.shard(b).numel());
      for (const ShardPiece& piece : shards.pieces(b)) {
        EXPECT_EQ(piece.shard_offset, piece.bucket_offset - shards.shard(b).begin);
        EXPECT_LE(piece.shard_offset + piece.numel, shards.shard(b).numel());
        EXPECT_EQ(shards.piece_of(piece.parameter).parameter_offset, piece.parameter_offset);
      }
    }
    for (int p = 0; p < layout.num_parameters(); ++p) {
      EXPECT_EQ(shards.piece_of(p).parameter, p);
      EXPECT_EQ(shards.piece_of(p, rank).numel, shards.piece_of(p).numel);
      owned[static_cast<std::size_t>(p)] += shards.piece_of(p).numel;
    }
  }
  EXPECT_EQ(owned, numels);
}

TEST(ShardLayout, ANodesPartsTileABucketAndHoldTheShardsOfTheirKeepers) {
  const std::vector<std::int64_t> numels{5, 70'000, 4096 * 3 + 1, 0, 4096};
  const BucketLayout layout(numels, {.bucket_numel = 80'000});
  for (const auto& [world_size, node_size] : {std::pair{4, 2}, {6, 3}, {6, 2}, {12, 4}, {4, 4}, {4, 1}, {40, 4}}) {
    for (int b = 0; b < layout.num_buckets(); ++b) {
      const ShardLayout first(layout, 0, world_size, node_size);
      std::int64_t seen = 0;
      for (int rank = 0; rank < node_size; ++rank) {
        const Shard part = first.node_part(b, rank);
        EXPECT_TRUE(part.numel() == 0 || part.begin == seen) << "rank " << rank;
        seen = std::max(seen, part.end);
        std::int64_t numel = 0;
        for (int other = 0; other < world_size; ++other) {
          const ShardLayout shards(layout, other, world_size, node_size);
          EXPECT_EQ(shards.shares_node(rank), other < node_size);
          if (shards.keeps_same_part(rank)) {
            numel += shards.shard(b).numel();
          }
        }
        EXPECT_EQ(numel, part.numel());
      }
      EXPECT_EQ(seen, layout.buckets()[static_cast<std::size_t>(b)].numel);
    }
  }
}

TEST(ShardLayout, RefusesNodesOfDifferentSizes) {
  const BucketLayout layout(std::vector<std::int64_t>{5}, {});
  EXPECT_THROW(ShardLayout(layout, 0, 4, 3), InternalError);
}

TEST(ShardLayout, RefusesARankOutsideTheWorld) { EXPECT_THROW((void)shard_of({}, 2, 2), InternalError); }

}  // namespace
}  // namespace pannier
