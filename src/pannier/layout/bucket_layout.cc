#include "pannier/layout/bucket_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {

void BucketOptions::validate() const {
  if (bucket_numel < 1) {
    throw ConfigError(fmt::format("bucket_numel must be positive, got {}", bucket_numel));
  }
}

BucketLayout::BucketLayout(std::span<const std::int64_t> numels, const BucketOptions& options,
                           std::span<const int> group_of) {
  add(numels, options, group_of);
}

BucketLayout BucketLayout::followed_by(std::span<const std::int64_t> numels, const BucketOptions& options,
                                       std::span<const int> group_of) const {
  BucketLayout all = *this;
  all.open_.clear();
  all.add(numels, options, group_of);
  return all;
}

void BucketLayout::add(std::span<const std::int64_t> numels, const BucketOptions& options,
                       std::span<const int> group_of) {
  options.validate();
  PANNIER_CHECK(group_of.empty() || group_of.size() == numels.size(),
                fmt::format("{} groups of {} parameters", group_of.size(), numels.size()));
  const std::size_t first = bucket_of_.size();
  bucket_of_.resize(first + numels.size());
  segment_index_.resize(first + numels.size());
  for (const bool last : {false, true}) {
    for (std::size_t i = numels.size(); i-- > 0;) {
      const int group = group_of.empty() ? 0 : group_of[i];
      if ((group == kLastGroup) == last) {
        place(static_cast<int>(first + i), numels[i], group, options);
      }
    }
  }
}

void BucketLayout::place(int parameter, std::int64_t numel, int group, const BucketOptions& options) {
  PANNIER_CHECK(numel >= 0, fmt::format("parameter {} has {} elements", parameter, numel));
  const auto open = open_.find(group);
  const bool fits =
      open != open_.end() && buckets_[static_cast<std::size_t>(open->second)].numel + numel <= options.bucket_numel;
  if (!fits) {
    open_[group] = num_buckets();
    buckets_.emplace_back();
    group_of_.push_back(group);
  }
  const int index = open_[group];
  Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
  bucket_of_[static_cast<std::size_t>(parameter)] = index;
  segment_index_[static_cast<std::size_t>(parameter)] = bucket.segments.size();
  bucket.segments.push_back({.parameter = parameter, .offset = bucket.numel, .numel = numel});
  bucket.numel += round_up(numel, kSegmentAlignment);
}

const Segment& BucketLayout::segment_of(int parameter) const {
  const auto& bucket = buckets_.at(static_cast<std::size_t>(bucket_of(parameter)));
  return bucket.segments.at(segment_index_.at(static_cast<std::size_t>(parameter)));
}

std::int64_t BucketLayout::numel() const noexcept {
  std::int64_t sum = 0;
  for (const auto& bucket : buckets_) {
    sum += bucket.numel;
  }
  return sum;
}

Shard shard_of(const Bucket& bucket, int rank, int world_size) {
  PANNIER_CHECK(0 <= rank && rank < world_size, fmt::format("rank {} of {}", rank, world_size));
  std::int64_t num_blocks = 0;
  for (const auto& segment : bucket.segments) {
    num_blocks += (segment.numel + kBlockNumel - 1) / kBlockNumel;
  }
  const std::int64_t first = num_blocks * rank / world_size;
  const std::int64_t last = num_blocks * (rank + 1) / world_size;
  Shard shard;
  std::int64_t seen = 0;
  for (const auto& segment : bucket.segments) {
    const std::int64_t blocks = (segment.numel + kBlockNumel - 1) / kBlockNumel;
    const std::int64_t from = std::clamp<std::int64_t>(first - seen, 0, blocks) * kBlockNumel;
    const std::int64_t to = std::min(std::clamp<std::int64_t>(last - seen, 0, blocks) * kBlockNumel, segment.numel);
    if (from < to) {
      shard.pieces.push_back({segment.parameter, from, segment.offset + from, to - from});
    }
    seen += blocks;
  }
  if (!shard.pieces.empty()) {
    shard.begin = shard.pieces.front().bucket_offset;
    // Rounds the end up so that the next shard starts aligned; the bytes between are padding that nobody reads.
    shard.end = std::min(round_up(shard.pieces.back().bucket_offset + shard.pieces.back().numel, kSegmentAlignment),
                         bucket.numel);
  }
  return shard;
}

}  // namespace pannier
