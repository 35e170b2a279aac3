#include "pannier/layout/shard_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "pannier/base/error.h"

namespace pannier {

ShardLayout::ShardLayout(const BucketLayout& buckets, int rank, int world_size, int node_size)
    : buckets_(buckets),
      rank_(rank),
      world_size_(world_size),
      node_size_(node_size == 0 ? world_size : node_size),
      piece_of_(static_cast<std::size_t>(buckets.num_parameters())) {
  PANNIER_CHECK(node_size_ > 0 && world_size % node_size_ == 0,
                fmt::format("nodes of {} ranks among {}", node_size_, world_size));
  for (std::size_t i = 0; i < piece_of_.size(); ++i) {
    piece_of_[i].parameter = static_cast<int>(i);
  }
  for (const Bucket& bucket : buckets.buckets()) {
    std::vector<Shard>& shards = shards_.emplace_back();
    for (int r = 0; r < world_size; ++r) {
      const int place = r % node_size_ * (world_size / node_size_) + r / node_size_;
      shards.push_back(shard_of(bucket, place, world_size));
    }
    const Shard& mine = shards.at(static_cast<std::size_t>(rank));
    std::vector<ShardPiece>& own = own_.emplace_back();
    for (const Piece& piece : mine.pieces) {
      own.push_back({piece, piece.bucket_offset - mine.begin});
      piece_of_[static_cast<std::size_t>(piece.parameter)] = own.back();
    }
  }
}

Shard ShardLayout::node_part(int bucket, int rank) const {
  Shard part;
  for (int r = rank % node_size_; r < world_size_; r += node_size_) {
    if (const Shard& one = shard(bucket, r); one.numel() > 0) {
      part.begin = part.numel() == 0 ? one.begin : part.begin;
      part.end = one.end;
    }
  }
  return part;
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
