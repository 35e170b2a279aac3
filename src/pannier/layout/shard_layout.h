// One rank's part of a model: its shard of every bucket, and so its piece of every parameter. A bucket is cut at block
// edges, so a parameter can lie on several ranks, each of which owns one run of it. In a world of one a shard is its
// whole bucket and a piece its whole parameter. Ranks may form nodes, each of which keeps all parameters, so that what
// a unit reads is gathered within the node.
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
  /// `node_size` consecutive ranks are a node, which keeps a copy of all parameters in parts; 0: all ranks are one. The
  /// shards of a node's part lie side by side: with nodes of P ranks, rank g * P + l owns the g-th run of the l-th
  /// part. Throws InternalError unless 0 <= rank < world_size and nodes are of one size.
  ShardLayout(const BucketLayout& buckets, int rank, int world_size, int node_size = 0);

  [[nodiscard]] const BucketLayout& buckets() const noexcept { return buckets_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world_size() const noexcept { return world_size_; }
  [[nodiscard]] int node_size() const noexcept { return node_size_; }
  /// Whether a rank is of this rank's node; and whether it keeps the same part of another.
  [[nodiscard]] bool shares_node(int rank) const noexcept { return rank / node_size_ == rank_ / node_size_; }
  [[nodiscard]] bool keeps_same_part(int rank) const noexcept { return rank % node_size_ == rank_ % node_size_; }

  /// The shard of a rank.
  [[nodiscard]] const Shard& shard(int bucket, int rank) const {
    return shards_.at(static_cast<std::size_t>(bucket)).at(static_cast<std::size_t>(rank));
  }
  /// This rank's.
  [[nodiscard]] const Shard& shard(int bucket) const { return shard(bucket, rank_); }
  /// The elements that a rank keeps for its node: its own shard, and those of the ranks that keep the same part of
  /// other nodes. Its pieces are left out.
  [[nodiscard]] Shard node_part(int bucket, int rank) const;
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
  int node_size_;
  std::vector<std::vector<Shard>> shards_;    ///< [bucket][rank].
  std::vector<std::vector<ShardPiece>> own_;  ///< By bucket.
  std::vector<ShardPiece> piece_of_;          ///< By parameter.
};

}  // namespace pannier
