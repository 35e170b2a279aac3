// One rank's part of a model: its shard of every bucket, and so its piece of every parameter. A bucket is cut at block
// edges, so a parameter can lie on several ranks, each of which owns one run of it. In a world of one a shard is its
// whole bucket and a piece its whole parameter.
#pragma once

#include <cstdint>
#include <vector>

#include "pannier/layout/bucket_layout.h"

namespace pannier {

/// A piece of this rank's, and where it lies in its shard.
struct ShardPiece : Piece {
  std::int64_t shard_offset = 0;  ///< Elements before it in the shard.
};

/// The shards of all ranks, seen from one of them. Immutable; the bucket layout must outlive it.
class ShardLayout {
 public:
  /// Throws InternalError unless 0 <= rank < world_size.
  ShardLayout(const BucketLayout& buckets, int rank, int world_size);

  [[nodiscard]] const BucketLayout& buckets() const noexcept { return buckets_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world_size() const noexcept { return world_size_; }

  /// The shard of a rank.
  [[nodiscard]] const Shard& shard(int bucket, int rank) const {
    return shards_.at(static_cast<std::size_t>(bucket)).at(static_cast<std::size_t>(rank));
  }
  /// This rank's.
  [[nodiscard]] const Shard& shard(int bucket) const { return shard(bucket, rank_); }
  /// This rank's pieces in a bucket, those without elements left out.
  [[nodiscard]] const std::vector<ShardPiece>& pieces(int bucket) const {
    return own_.at(static_cast<std::size_t>(bucket));
  }
  /// This rank's piece of a parameter; one of no elements where it owns nothing of it.
  [[nodiscard]] const ShardPiece& piece_of(int parameter) const {
    return piece_of_.at(static_cast<std::size_t>(parameter));
  }
  /// A rank's piece of a parameter.
  [[nodiscard]] Piece piece_of(int parameter, int rank) const;
  /// Elements of this rank's shard of each bucket, padding included.
  [[nodiscard]] std::vector<std::int64_t> numels() const;
  /// The same of all buckets.
  [[nodiscard]] std::int64_t numel() const;

 private:
  const BucketLayout& buckets_;
  int rank_;
  int world_size_;
  std::vector<std::vector<Shard>> shards_;    ///< [bucket][rank].
  std::vector<std::vector<ShardPiece>> own_;  ///< By bucket.
  std::vector<ShardPiece> piece_of_;          ///< By parameter.
};

}  // namespace pannier
