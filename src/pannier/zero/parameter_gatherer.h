// Stage 3: each rank keeps its shard of a bucket's parameters, and all ranks make the bucket whole just before a unit
// of the model (a transformer's block, an embedding) reads it, in forward and again in backward.
//
//  1. A gather allocates the bucket flat, puts this rank's shard into its place (from the device or from host memory)
//     and exchanges shards (shard_gathering.h says with whom). Then the storages of the parameters point into it, and
//     so do all views that autograd saved.
//  2. After use the storages lose the memory, and the parameters are given one that refuses to be read, so that nobody
//     ever sees an old value.
//  3. Which unit comes next is known from the last window; its gather begins while the present unit runs. A wrong guess
//     costs bytes, nothing else.
//  4. A step begins with everything at rest, and updates what rests. Nothing is gathered in it.
//
// A gather is collective: what calls for one is the model's own course, which must be the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/tier/parameter_residence.h"
#include "pannier/tier/parameter_shards.h"
#include "pannier/tier/released_parameters.h"
#include "pannier/zero/shard_gathering.h"
#include "pannier/zero/unit_order.h"

namespace pannier {

/// What a gatherer works on. Everything must outlive it.
struct ParameterGathererParts {
  Device& device;
  const ShardLayout& shards;  ///< Buckets of kLastGroup stay whole.
  ParameterBuckets& parameters;
  ShardGathering& gathering;
  ParameterShards& rest;
};

/// How to gather.
struct ParameterGathererOptions {
  std::vector<std::vector<int>> units;  ///< The parameters that each unit reads; unit 0 is the whole model's forward.
  std::int64_t prefetch_numel = 0;      ///< Elements gathered ahead of use; the next unit is, if this is not 0.
  std::optional<int> num_trained_buckets = {};  ///< Those after them are frozen: no step changes them. Empty: none is.
  /// Told why a shard can't be had, before that is thrown: other ranks wait for it in a gather. Null: nobody is.
  std::function<void(const std::string& why)> on_failure = nullptr;
};

/// Makes buckets whole and takes them apart. Of the engine's thread, or autograd's while a backward runs.
class ParameterGatherer final : public ParameterResidence {
 public:
  ParameterGatherer(const ParameterGathererParts& parts, const ParameterGathererOptions& options);
  ~ParameterGatherer() override;

  /// A unit is about to run, and has run. Calls nest. Throws CollectiveError.
  void begin_forward(int unit);
  void end_forward(int unit);
  /// A unit's backward begins, and has ended, as far as its parameters are concerned. Returns the buckets that it may
  /// read; with unit 0 those read outside of their units are among them.
  std::vector<int> begin_backward(int unit);
  void end_backward(int unit);
  /// The whole backward has ended.
  void finish_backward();
  /// Somebody in the model reads a parameter whose unit does not run. Its bucket is whole until the model's forward
  /// ends, and from now on in each backward too. Outside of a forward and a backward it stays as it is.
  void use(int parameter);
  /// Makes the buckets of these parameters whole until let_go(). All ranks call it.
  void hold(const std::vector<int>& parameters);
  void let_go(const std::vector<int>& parameters);
  [[nodiscard]] bool is_held() const noexcept { return num_held_ > 0; }
  /// Before a step, which must not be inside hold(): everything rests. Throws CollectiveError where ranks gathered
  /// different things.
  void rest_all();
  /// The window has ended: what came after what is the record for the next.
  void end_window();

  [[nodiscard]] const std::vector<int>& buckets_of(int unit) const {
    return buckets_of_.at(static_cast<std::size_t>(unit));
  }
  [[nodiscard]] bool is_whole(int bucket) const { return parts_.parameters.has_memory(bucket); }

  [[nodiscard]] bool rests_whole(int bucket) const override;
  [[nodiscard]] at::Tensor own(int bucket) override;
  [[nodiscard]] bool lends_copies(int bucket) const override;
  void overwrite(int bucket) override;
  void put_back(int bucket) override { parts_.rest.put_back(bucket); }
  void settle(int bucket) override;
  [[nodiscard]] std::byte* host_address(int bucket) override {
    return rests_whole(bucket) ? nullptr : parts_.rest.host_address(bucket);
  }
  void make_whole(int bucket) override;
  void keep(int bucket) override;
  void let_rest(int bucket) override;
  [[nodiscard]] std::vector<int> take_edited() override;

 private:
  struct Slot {
    at::Tensor coming;                         ///< The flat bucket while it is on its way.
    std::unique_ptr<PendingExchange> pending;  ///< Null until shards are exchanged.
    int num_holders = 0;
    bool is_external = false;  ///< Read outside of its unit.
  };

  [[nodiscard]] Slot& slot(int bucket) { return slots_.at(static_cast<std::size_t>(bucket)); }
  [[nodiscard]] at::Tensor own_part(const at::Tensor& flat, int bucket) const;
  void raise(int bucket);
  template <class Work>
  void tell_failure_of(Work&& work);
  void send(int bucket);
  void need(const std::vector<int>& buckets, int unit);
  void raise_ahead();
  void expect_ahead();
  void send_next();
  void add_holder(int bucket) { ++slot(bucket).num_holders; }
  void remove_holder(int bucket);
  void release(int bucket);
  void drop_coming(int bucket);
  void let_go_externals();
  void forget_holders();
  [[nodiscard]] bool is_inside() const { return num_forward_.at(0) > 0 || in_backward_; }

  ParameterGathererParts parts_;
  ReleasedParameters released_;
  std::int64_t prefetch_numel_;
  std::function<void(const std::string& why)> on_failure_;
  int num_trained_buckets_;
  /// The exchange of the next unit's shards begins before the present unit's work is queued, where that does not make
  /// the host wait; else after, and not at all in a world of one, which has nothing to exchange.
  bool sends_early_;
  bool sends_late_;
  std::vector<std::vector<int>> buckets_of_;  ///< By unit; those that stay whole left out.
  std::vector<Slot> slots_;                   ///< By bucket.
  std::vector<int> num_forward_;              ///< By unit: calls that run.
  std::vector<int> num_backward_;
  std::set<int> externals_;  ///< Buckets read outside of their unit that are whole now for that reason.
  std::set<int> edited_;
  std::set<int> unkept_;                           ///< Buckets with edits that do not rest yet.
  std::map<int, std::vector<c10::Storage>> lent_;  ///< By bucket held for somebody: the storages that graphs know.
  bool in_backward_ = false;
  int num_held_ = 0;  ///< hold() without let_go().
  UnitOrder order_;
  at::Tensor mismatch_;  ///< On a device: whether a stamp was wrong; undefined: none was.
};

}  // namespace pannier
