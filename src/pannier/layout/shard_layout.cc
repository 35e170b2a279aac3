#include "pannier/layout/shard_layout.h"

#include <numeric>

namespace pannier {

ShardLayout::ShardLayout(const BucketLayout& buckets, int rank, int world_size)
    : buckets_(buckets),
      rank_(rank),
      world_size_(world_size),
      piece_of_(static_cast<std::size_t>(buckets.num_parameters())) {
  for (std::size_t i = 0; i < piece_of_.size(); ++i) {
    piece_of_[i].parameter = static_cast<int>(i);
  }
  for (const Bucket& bucket : buckets.buckets()) {
    std::vector<Shard>& shards = shards_.emplace_back();
    for (int r = 0; r < world_size; ++r) {
      shards.push_back(shard_of(bucket, r, world_size));
    }
    const Shard& mine = shards.at(static_cast<std::size_t>(rank));
    std::vector<ShardPiece>& own = own_.emplace_back();
    for (const Piece& piece : mine.pieces) {
      own.push_back({piece, piece.bucket_offset - mine.begin});
      piece_of_[static_cast<std::size_t>(piece.parameter)] = own.back();
    }
  }
}

Piece ShardLayout::piece_of(int parameter, int rank) const {
  for (const Piece& piece : shard(buckets_.bucket_of(parameter), rank).pieces) {
    if (piece.parameter == parameter) {
      return piece;
    }
  }
  return {.parameter = parameter};
}

std::vector<std::int64_t> ShardLayout::numels() const {
  std::vector<std::int64_t> numels;
  for (int b = 0; b < buckets_.num_buckets(); ++b) {
    numels.push_back(shard(b).numel());
  }
  return numels;
}

std::int64_t ShardLayout::numel() const {
  const auto all = numels();
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

}  // namespace pannier
