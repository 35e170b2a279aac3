// Gradients on their way from autograd to the update. The hook moves each gradient into its bucket; when a bucket is
// full it is closed: shared with the other ranks, and what this rank gets of the sum handed to the GradientStore, while
// backward goes on. Among ranks buckets close in the order of their index, since collectives pair by order.
//
// When is a bucket full? Counting one firing a parameter would be wrong: checkpointed segments fire a shared parameter
// several times, and some parameters are not used at all. So:
//  1. In the first window nothing closes before its backward ends; how often each parameter fires in the window's
//  first,
//     second, ... backward is recorded.
//  2. Later, a bucket closes in a backward as soon as each of its parameters has fired as often as recorded; one with a
//     parameter that has never fired waits for the end.
//  3. What is still open closes when the backward ends.
//     Where buckets close by unit (stage 3), one waits for the end if on any rank a gradient came after its last unit
//     had ended (the parameter was read outside of its unit too), or if a unit was not seen to end.
//  4. A gradient that arrives after its bucket was closed in the same backward (a part that ran more often than in any
//     step before, another backward that the caller runs himself) waits in place of the bucket's: alone until the
//     backward ends, among ranks until the next one closes the bucket or the window ends, when all ranks learn of it.
//     The record rises, so that the bucket waits for it from then on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pannier/comm/communicator.h"
#include "pannier/device/device.h"
#include "pannier/layout/shard_layout.h"
#include "pannier/tier/gradient_store.h"
#include "pannier/tier/parameter_buckets.h"
#include "pannier/zero/gradient_hook.h"
#include "pannier/zero/gradient_sharing.h"

namespace pannier {

/// What a reducer works on. Everything must outlive it.
struct GradientReducerParts {
  Device& device;
  const ShardLayout& shards;  ///< Of parameters that are trained; those after them get no gradient.
  ParameterBuckets& parameters;
  GradientStore& store;
  Communicator& communicator;
  GradientJudge& judge;
  /// Makes the way from a bucket's gradients to those of this rank's pieces.
  std::function<std::unique_ptr<GradientSharing>(GradientSharing::Deliver)> make_sharing = make_solo_sharing;
  /// A bucket is full when its units' backwards have ended as often as recorded, instead of when its parameters have
  /// fired: ranks that use different parameters of a unit then close it at the same point among their gathers.
  bool closes_by_unit = false;
};

/// Collects gradients over one accumulation window. Called by autograd's thread while a backward runs, otherwise by the
/// engine's; never by two at once.
class GradientReducer {
 public:
  explicit GradientReducer(const GradientReducerParts& parts);

  /// Opens a backward. `last`: it is the window's last, as far as is known. `divisor`: its gradients are divided by it,
  /// where its loss was not.
  void begin_backward(bool last, std::int64_t divisor = 1);
  /// From now on gradients that can wait are not shared with other ranks in backward (no_sync), or are again.
  void hold(bool holding) { sharing_->hold(holding); }
  /// Closes what is open. Throws nothing that a complete backward can cause, but CollectiveError.
  void end_backward();
  [[nodiscard]] bool in_backward() const noexcept { return in_backward_; }
  /// The backward of a unit that reads these buckets begins, and has ended. One whose end is not seen keeps them open.
  /// Matters where buckets close by unit.
  void unit_began(const std::vector<int>& buckets);
  void unit_ended(const std::vector<int>& buckets);
  /// Whether any gradient has arrived in this window, or a backward ran without one.
  [[nodiscard]] bool window_has_backward() const noexcept { return backward_index_ > 0 || in_backward_; }

  /// Says whether all ranks gave the same fingerprint. Ends the window: afterwards the sum of every used parameter's
  /// piece is in the store, and the judge has seen all of all ranks. Throws CollectiveError.
  bool finish_window(std::int64_t fingerprint = 0);
  /// This rank's piece of the window's gradient so far, summed over ranks, flat, fp32; empty where none has come. All
  /// ranks call it, outside of a backward.
  [[nodiscard]] std::optional<at::Tensor> piece(int parameter);
  /// Replaces it by `flat`, fp32; nothing on ranks that own none of the parameter. All ranks call it.
  void replace(int parameter, const at::Tensor& flat);
  /// Whether gradients wait that came after their bucket was closed, which is never so on a world of one.
  [[nodiscard]] bool has_late() const;
  /// Whether a parameter got a gradient in this window: from this rank's backward, and after finish_window() from any
  /// rank's.
  [[nodiscard]] bool used(int parameter) const { return used_.at(static_cast<std::size_t>(parameter)); }
  /// Forgets the window's gradients and starts a new one. `complete`: its firings are as good a record as any.
  void drop_window(bool complete);

  /// Throws ConfigError for a parameter whose autograd node was replaced since the backward began (it is hooked again),
  /// or that holds a gradient in `.grad`, where nobody would see it.
  void check_hooks();
  /// Hooks again, before a backward, what lost its node since the last one; no gradient is lost then.
  void renew_hooks();
  /// Called with each bucket when it closes, after its gradients went to the store.
  void on_closed(std::function<void(int)> closed) { closed_ = std::move(closed); }
  /// Called with the parameter for a gradient outside of begin_backward and end_backward; may throw to refuse it.
  void on_unannounced(std::function<void(int)> begin) { begin_unannounced_ = std::move(begin); }
  /// Whether a gradient was refused, or a backward that the caller ran himself did not come to its end.
  [[nodiscard]] bool backward_failed() const noexcept { return refused_ || *unfinished_; }

 private:
  struct OpenBucket {
    int num_waiting = 0;  ///< Parameters that have not fired as often as recorded.
    bool full = false;    ///< None waits; it may still wait for buckets before it.
    bool closed = false;  ///< In this backward.
  };

  void receive(int parameter);
  void take(int parameter, at::Tensor& holder);
  void watch_end();
  void check_gradient(int parameter, const at::Tensor& gradient) const;
  [[nodiscard]] at::Tensor flat_gradient(int parameter, const at::Tensor& gradient);
  void close_full(int bucket);
  void close(int bucket);
  void deliver(int bucket, std::vector<FlatGradient> gradients, bool last);
  void judge_bucket(int bucket);
  void judge_anew();
  /// Shares what came late on any rank. Every rank calls it, outside of backwards. Throws CollectiveError.
  void share_late();
  [[nodiscard]] bool judge_all(std::int64_t fingerprint, bool& is_late);
  [[nodiscard]] bool agree(std::int64_t fingerprint, bool& is_late);
  [[nodiscard]] bool is_judged_early(const at::Tensor& gradient, int parameter, bool last);
  [[nodiscard]] int expected(int parameter) const;
  [[nodiscard]] const BucketLayout& layout() const noexcept { return shards_.buckets(); }

  Device& device_;
  const ShardLayout& shards_;
  ParameterBuckets& parameters_;
  GradientStore& store_;
  Communicator& communicator_;
  GradientJudge& judge_;
  std::unique_ptr<GradientSharing> sharing_;
  std::shared_ptr<GradientListener> listener_;
  std::vector<GradientHook> hooks_;
  std::function<void(int)> begin_unannounced_;
  std::function<void(int)> closed_;

  bool refused_ = false;
  /// True between the first gradient of a backward and its end; shared with autograd's callback, which may outlive us.
  std::shared_ptr<bool> unfinished_ = std::make_shared<bool>(false);
  bool in_backward_ = false;
  bool last_backward_ = false;
  std::int64_t divisor_ = 1;        ///< Of this backward's gradients.
  std::size_t backward_index_ = 0;  ///< Backwards that have begun in this window.
  bool recorded_ = false;           ///< A complete window has been seen.
  bool closes_by_unit_ = false;
  std::vector<std::vector<int>> record_;       ///< [backward][parameter]: firings.
  std::vector<std::vector<int>> unit_record_;  ///< [backward][bucket]: ends of units.
  std::vector<int> units_begun_;               ///< In this backward, by bucket.
  std::vector<int> units_ended_;
  /// Units that had ended, none running, when the bucket's last gradient came.
  std::vector<int> ends_before_gradient_;
  std::vector<std::int64_t> stays_open_;  ///< On so many ranks the bucket can't close before its backward ends.
  std::vector<at::Tensor> arrived_;       ///< Flat gradients whose bucket has yet to close, by parameter.
  std::vector<int> fired_;                ///< In this backward, by parameter.
  std::vector<bool> used_;
  std::vector<bool> judged_;  ///< The judge has seen this parameter's sum on its way to the host.
  std::vector<OpenBucket> open_;
  std::vector<std::int64_t> late_;  ///< 1: gradients of this bucket arrived after it was closed.
  int num_closed_ = 0;              ///< Where buckets close in order: those before this one are.
};

}  // namespace pannier
