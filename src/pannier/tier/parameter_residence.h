// Where a bucket's parameters are between uses. With stages 0 to 2 every rank has all of them whole on the device, and
// nothing here does anything. With stage 3 each keeps its own part alone, on the device, in host memory or on a disk,
// and makes a bucket whole when somebody needs it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "pannier/layout/shard_layout.h"
#include "pannier/tier/parameter_buckets.h"

namespace pannier {

/// What the update needs to know of it. Of the engine's thread alone.
class ParameterResidence {
 public:
  ParameterResidence() = default;
  virtual ~ParameterResidence() = default;
  ParameterResidence(const ParameterResidence&) = delete;
  ParameterResidence& operator=(const ParameterResidence&) = delete;

  /// Whether a bucket stays whole on every rank, so that what an update changed must be sent to the others.
  [[nodiscard]] virtual bool rests_whole(int bucket) const = 0;
  /// This rank's part of a bucket, on the device, to be read and written there until put_back().
  [[nodiscard]] virtual at::Tensor own(int bucket) = 0;
  /// Whether own() is a copy of what rests elsewhere than on the device or in host memory, and put_back() costs.
  [[nodiscard]] virtual bool lends_copies(int /*bucket*/) const { return false; }
  /// Before own() for who will write all of it: where it is a copy, its values need not be there.
  virtual void overwrite(int /*bucket*/) {}
  /// What was written into own() becomes what rests. Nothing where own() was not called.
  virtual void put_back(int bucket) = 0;
  /// The host waits until nothing is on its way to or from where this rank's part rests.
  virtual void settle(int bucket) = 0;
  /// Where this rank's part rests, if that is host memory; else null.
  [[nodiscard]] virtual std::byte* host_address(int bucket) = 0;
  /// Makes a bucket whole. All ranks call it. Throws CollectiveError.
  virtual void make_whole(int bucket) = 0;
  /// A whole bucket was written: what rests follows.
  virtual void keep(int bucket) = 0;
  /// Takes a bucket apart again, unless somebody else needs it whole.
  virtual void let_rest(int bucket) = 0;
  /// keep(), let_rest() and settle(). For one bucket after the other: the device holds one of them at a time, however
  /// slow the way off it is.
  void put_to_rest(int bucket) {
    keep(bucket);
    let_rest(bucket);
    settle(bucket);
  }
  /// Parameters that were edited while they were whole, since the last call, in buckets that are whole no more.
  [[nodiscard]] virtual std::vector<int> take_edited() = 0;
};

/// Of parameters that are always whole. What it refers to must outlive it.
[[nodiscard]] std::unique_ptr<ParameterResidence> make_whole_residence(const ShardLayout& shards,
                                                                       ParameterBuckets& parameters);

}  // namespace pannier
