// Who owns which element. Parameters are laid out one after the other in buckets, in backward order (the last parameter
// of the model first), because gradients arrive in that order. A parameter is never cut by a bucket; a bucket is cut
// over ranks at block edges, where blocks of kBlockNumel elements are counted from each parameter's own start. Pure
// integers.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace pannier {

/// Elements of a block: the unit in which buckets are cut over ranks and gradient norms are summed.
inline constexpr std::int64_t kBlockNumel = 4096;

/// Every parameter starts at a multiple of this many elements in its bucket (128 bytes of bf16).
inline constexpr std::int64_t kSegmentAlignment = 64;

/// How parameters are gathered into buckets.
struct BucketOptions {
  std::int64_t bucket_numel = std::int64_t{16}
                              << 20;  ///< A bucket is closed before it would exceed this many elements.
  void validate() const;              ///< Throws ConfigError unless bucket_numel is positive.
};

/// The group of parameters whose buckets come last; see BucketLayout.
inline constexpr int kLastGroup = -1;

/// One parameter's place in its bucket.
struct Segment {
  int parameter = 0;        ///< Index in the model's order.
  std::int64_t offset = 0;  ///< First element, counted from the bucket's start.
  std::int64_t numel = 0;   ///< May be 0.
};

/// A run of parameters stored flat: the unit of reduction, transfer, update and placement.
struct Bucket {
  std::vector<Segment> segments;  ///< In backward order.
  std::int64_t numel = 0;         ///< Elements stored, padding between segments included.
};

/// A part of one parameter that one rank owns.
struct Piece {
  int parameter = 0;
  std::int64_t parameter_offset = 0;  ///< Elements before it in the parameter; a multiple of kBlockNumel.
  std::int64_t bucket_offset = 0;     ///< Elements before it in the bucket.
  std::int64_t numel = 0;
};

/// One rank's slice of a bucket: the contiguous range [begin, end) and the parameter pieces inside it.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<Piece> pieces;
  [[nodiscard]] std::int64_t numel() const noexcept { return end - begin; }
};

/// The buckets of a model. Immutable.
class BucketLayout {
 public:
  /// `numels[i]` is the element count of parameter i in the model's order. Parameters of different groups never share a
  /// bucket; those of kLastGroup come after all others. Without `group_of` all are one group. Throws ConfigError for
  /// bad options and InternalError for a negative count.
  BucketLayout(std::span<const std::int64_t> numels, const BucketOptions& options, std::span<const int> group_of = {});

  /// These buckets, and after them others that hold further parameters, which are numbered from num_parameters() on and
  /// laid out by the same rules among themselves. Throws as the constructor.
  [[nodiscard]] BucketLayout followed_by(std::span<const std::int64_t> numels, const BucketOptions& options,
                                         std::span<const int> group_of = {}) const;

  [[nodiscard]] const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  [[nodiscard]] int num_buckets() const noexcept { return static_cast<int>(buckets_.size()); }
  [[nodiscard]] int num_parameters() const noexcept { return static_cast<int>(bucket_of_.size()); }
  /// The bucket that holds a parameter.
  [[nodiscard]] int bucket_of(int parameter) const { return bucket_of_.at(static_cast<std::size_t>(parameter)); }
  /// A parameter's place in its bucket.
  [[nodiscard]] const Segment& segment_of(int parameter) const;
  /// The group of a bucket's parameters; 0 where there were none.
  [[nodiscard]] int group_of(int bucket) const { return group_of_.at(static_cast<std::size_t>(bucket)); }
  /// Elements stored in all buckets, padding included.
  [[nodiscard]] std::int64_t numel() const noexcept;

 private:
  void add(std::span<const std::int64_t> numels, const BucketOptions& options, std::span<const int> group_of);
  void place(int parameter, std::int64_t numel, int group, const BucketOptions& options);

  std::vector<Bucket> buckets_;
  std::vector<int> bucket_of_;
  std::vector<int> group_of_;  ///< By bucket.
  std::map<int, int> open_;    ///< By group: its last bucket.
  std::vector<std::size_t> segment_index_;
};

/// Cuts a bucket over ranks in whole blocks, as evenly as blocks allow; a shard may be empty. Over all ranks every
/// element is owned once. Throws InternalError unless 0 <= rank < world_size.
[[nodiscard]] Shard shard_of(const Bucket& bucket, int rank, int world_size);

}  // namespace pannier
