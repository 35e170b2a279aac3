// What becomes of a bucket's gradients when a backward has given them. Alone, they are the sum already. Among ranks
// they are packed as the bucket is laid out, every rank is sent the shard that it owns, and each adds up what came for
// its own in fp32, in rank order, so that neither bucket sizes nor timing change a bit. Until then the next buckets'
// backward goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "pannier/comm/shard_exchange.h"
#include "pannier/device/device.h"
#include "pannier/layout/shard_layout.h"

namespace pannier {

/// The gradient of a parameter, or of this rank's piece of one, flat on the device; nobody else writes it.
struct FlatGradient {
  int parameter = 0;
  at::Tensor values;
};

/// Takes the gradients of buckets and delivers those of this rank's pieces. Every rank takes the same buckets in the
/// same order. One thread at a time.
class GradientSharing {
 public:
  /// Called with a bucket's gradients, summed over ranks; `last`: no further micro-batch of this window is expected.
  using Deliver = std::function<void(int bucket, std::vector<FlatGradient> gradients, bool last)>;

  GradientSharing() = default;
  virtual ~GradientSharing() = default;
  GradientSharing(const GradientSharing&) = delete;
  GradientSharing& operator=(const GradientSharing&) = delete;

  /// Whether buckets must be taken in the order of their index.
  [[nodiscard]] virtual bool in_order() const noexcept = 0;
  /// What backward gave of a bucket; parameters that it did not use are left out.
  virtual void take(int bucket, std::vector<FlatGradient> gradients, bool last) = 0;
  /// While holding, gradients that can wait are only added up on this rank (no_sync). The same on every rank.
  virtual void hold(bool holding) = 0;
  /// Delivers what is under way. Throws CollectiveError.
  virtual void finish() = 0;
  /// The window ends: shares and delivers what was held until now. Throws CollectiveError.
  virtual void finish_window() = 0;
  /// The sum over ranks of what is held of a bucket, for this rank's pieces, in fp32; it stays held. Empty where
  /// nothing is, which is so on all ranks or on none. All ranks call it. Throws CollectiveError.
  [[nodiscard]] virtual std::vector<FlatGradient> held(int bucket) = 0;
  /// Forgets what is held of a parameter.
  virtual void forget(int parameter) = 0;
  /// Forgets what is kept for later micro-batches.
  virtual void drop() = 0;
};

/// For a world of one.
[[nodiscard]] std::unique_ptr<GradientSharing> make_solo_sharing(GradientSharing::Deliver deliver);

/// What sharing among ranks works on. Everything must outlive it.
struct SharingParts {
  Device& device;
  const ShardLayout& shards;
  ShardExchange& exchange;
  at::ScalarType type = at::kFloat;  ///< Of gradients.
};

/// For many ranks. With `sums_first` the micro-batches of a window with several are added up in fp32 on each rank and
/// the sums shared when the last has come (stage 1); else each is shared as it comes (stages 2 and 3).
[[nodiscard]] std::unique_ptr<GradientSharing> make_rank_sharing(SharingParts parts, bool sums_first,
                                                                 GradientSharing::Deliver deliver);

}  // namespace pannier
