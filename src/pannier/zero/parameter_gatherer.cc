#include "pannier/zero/parameter_gatherer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"

namespace pannier {

ParameterGatherer::ParameterGatherer(const ParameterGathererParts& parts, const ParameterGathererOptions& options)
    : parts_(parts),
      released_(parts.shards.buckets(), parts.parameters,
                {.read = "while it was partitioned (zero_optimization.stage 3): it is whole while its module runs. "
                         "Elsewhere read it inside `with pannier.zero.GatheredParameters(param):`; where the model's "
                         "forward reads it by other ways than an attribute of its module, say so with "
                         "pannier.zero.register_external_parameter(module, param)",
                 .replaced = "while it was partitioned, and is not taken. Replace or set values inside `with "
                             "pannier.zero.GatheredParameters(param, modifier_rank=0):`"}),
      prefetch_numel_(options.prefetch_numel),
      on_failure_(options.on_failure),
      num_trained_buckets_(options.num_trained_buckets.value_or(parts.shards.buckets().num_buckets())),
      sends_early_(parts.rest.home() == Home::kDevice),
      sends_late_(!sends_early_ && parts.shards.world_size() > 1),
      slots_(static_cast<std::size_t>(parts.shards.buckets().num_buckets())),
      num_forward_(std::max<std::size_t>(options.units.size(), 1)),
      num_backward_(num_forward_.size()) {
  buckets_of_.resize(num_forward_.size());
  for (std::size_t unit = 0; unit < options.units.size(); ++unit) {
    std::set<int> buckets;
    for (const int parameter : options.units[unit]) {
      const int bucket = parts.shards.buckets().bucket_of(parameter);
      if (!rests_whole(bucket)) {
        buckets.insert(bucket);
      }
    }
    buckets_of_[unit].assign(buckets.begin(), buckets.end());
  }
}

ParameterGatherer::~ParameterGatherer() {
  for (int b = 0; b < static_cast<int>(slots_.size()); ++b) {
    try {
      drop_coming(b);
    } catch (const std::exception&) {
      continue;  // The ranks or the movers have failed before, and that was said.
    }
  }
}

bool ParameterGatherer::rests_whole(int bucket) const { return parts_.shards.buckets().group_of(bucket) == kLastGroup; }

at::Tensor ParameterGatherer::own_part(const at::Tensor& flat, int bucket) const {
  const Shard& shard = parts_.shards.shard(bucket);
  return flat.narrow(0, shard.begin, shard.numel());
}

at::Tensor ParameterGatherer::own(int bucket) {
  return is_whole(bucket) ? own_part(parts_.parameters.bucket(bucket), bucket) : parts_.rest.own(bucket);
}

bool ParameterGatherer::lends_copies(int bucket) const {
  return parts_.rest.home() == Home::kNvme && !rests_whole(bucket) && !is_whole(bucket);
}

void ParameterGatherer::overwrite(int bucket) {
  if (lends_copies(bucket)) {
    (void)parts_.rest.own_anew(bucket);
  }
}

void ParameterGatherer::settle(int bucket) { parts_.gathering.settle(bucket); }

// Padding between parameters is whatever was there: it is read and sent by nobody but within a rank's own shard.
void ParameterGatherer::raise(int bucket) {
  Slot& it = slot(bucket);
  if (!is_whole(bucket) && !it.coming.defined()) {
    const std::int64_t numel = parts_.shards.buckets().buckets()[static_cast<std::size_t>(bucket)].numel;
    it.coming = parts_.device.allocate(numel, parts_.parameters.dtype(bucket), Owner::kParameters);
    parts_.gathering.raise(bucket, it.coming);
  }
}

// Other ranks are told of a disk's error before they wait for this one.
template <class Work>
void ParameterGatherer::tell_failure_of(Work&& work) {
  try {
    work();
  } catch (const IoError& error) {
    if (on_failure_) {
      on_failure_(error.what());
    }
    throw;
  }
}

void ParameterGatherer::send(int bucket) {
  raise(bucket);
  Slot& it = slot(bucket);
  if (it.coming.defined() && !it.pending) {
    tell_failure_of([&] { it.pending = parts_.gathering.gather(bucket, it.coming); });
  }
}

void ParameterGatherer::make_whole(int bucket) {
  if (is_whole(bucket)) {
    return;
  }
  send(bucket);
  Slot& it = slot(bucket);
  it.pending->wait();
  if (const at::Tensor wrong = it.pending->mismatch(); wrong.defined()) {
    mismatch_ = mismatch_.defined() ? mismatch_.logical_or(wrong) : wrong;
  }
  it.pending.reset();
  parts_.parameters.give_memory(bucket, std::exchange(it.coming, at::Tensor()));
  released_.restore(bucket);
}

void ParameterGatherer::need(const std::vector<int>& buckets, int unit) {
  order_.saw(unit);
  for (const int bucket : buckets) {
    raise(bucket);
  }
  raise_ahead();
  expect_ahead();
  for (const int bucket : buckets) {
    send(bucket);
  }
  if (sends_early_) {
    send_next();
  }
  for (const int bucket : buckets) {
    make_whole(bucket);
  }
}

// Shards of the units that come next set out.
void ParameterGatherer::raise_ahead() {
  std::int64_t numel = 0;
  for (const int unit : order_.ahead()) {
    for (const int bucket : buckets_of(unit)) {
      if (is_whole(bucket)) {
        continue;
      }
      if (numel >= prefetch_numel_) {
        return;
      }
      numel += parts_.shards.buckets().buckets()[static_cast<std::size_t>(bucket)].numel;
      raise(bucket);
    }
  }
}

// A disk reads ahead of what has set out.
void ParameterGatherer::expect_ahead() {
  if (parts_.rest.home() != Home::kNvme) {
    return;
  }
  std::vector<int> buckets;
  for (const int unit : order_.ahead()) {
    for (const int bucket : buckets_of(unit)) {
      if (!is_whole(bucket)) {
        buckets.push_back(bucket);
      }
    }
  }
  parts_.rest.expect(std::move(buckets));
}

void ParameterGatherer::end_window() {
  order_.end_window();
  expect_ahead();
}

// Exchanges the shards of the next unit that is not whole, as far as they have set out.
void ParameterGatherer::send_next() {
  for (const int unit : order_.ahead()) {
    bool is_there = true;
    for (const int bucket : buckets_of(unit)) {
      is_there = is_there && is_whole(bucket);
      if (slot(bucket).coming.defined()) {
        send(bucket);
      }
    }
    if (!is_there) {
      return;
    }
  }
}

void ParameterGatherer::begin_forward(int unit) {
  ++num_forward_.at(static_cast<std::size_t>(unit));
  for (const int bucket : buckets_of(unit)) {
    add_holder(bucket);
  }
  need(buckets_of(unit), unit);
}

void ParameterGatherer::end_forward(int unit) {
  int& running = num_forward_.at(static_cast<std::size_t>(unit));
  if (running == 0) {
    return;  // A step or an error came in between.
  }
  --running;
  for (const int bucket : buckets_of(unit)) {
    remove_holder(bucket);
  }
  if (!is_inside()) {
    let_go_externals();
  }
  if (sends_late_) {
    send_next();
  }
}

std::vector<int> ParameterGatherer::begin_backward(int unit) {
  in_backward_ = true;
  ++num_backward_.at(static_cast<std::size_t>(unit));
  for (const int bucket : buckets_of(unit)) {
    add_holder(bucket);
  }
  need(buckets_of(unit), unit);
  std::vector<int> read = buckets_of(unit);
  for (int b = 0; unit == 0 && b < static_cast<int>(slots_.size()); ++b) {
    if (slot(b).is_external && externals_.insert(b).second) {
      add_holder(b);
      make_whole(b);
      read.push_back(b);
    }
  }
  return read;
}

void ParameterGatherer::end_backward(int unit) {
  int& running = num_backward_.at(static_cast<std::size_t>(unit));
  if (running == 0) {
    return;
  }
  --running;
  for (const int bucket : buckets_of(unit)) {
    remove_holder(bucket);
  }
  if (sends_late_ && in_backward_) {
    send_next();
  }
}

void ParameterGatherer::finish_backward() {
  in_backward_ = false;
  for (std::size_t unit = 0; unit < num_backward_.size(); ++unit) {
    while (num_backward_[unit] > 0) {
      end_backward(static_cast<int>(unit));
    }
  }
  if (!is_inside()) {
    let_go_externals();
  }
}

void ParameterGatherer::use(int parameter) {
  const int bucket = parts_.shards.buckets().bucket_of(parameter);
  if (rests_whole(bucket) || !is_inside()) {
    return;
  }
  slot(bucket).is_external = true;
  if (externals_.insert(bucket).second) {
    add_holder(bucket);
    make_whole(bucket);
  }
}

void ParameterGatherer::let_go_externals() {
  for (const int bucket : std::exchange(externals_, {})) {
    remove_holder(bucket);
  }
}

void ParameterGatherer::hold(const std::vector<int>& parameters) {
  std::set<int> buckets;
  for (const int parameter : parameters) {
    buckets.insert(parts_.shards.buckets().bucket_of(parameter));
  }
  for (const int bucket : buckets) {
    if (rests_whole(bucket)) {
      continue;
    }
    if (!is_whole(bucket)) {
      make_whole(bucket);
      lent_[bucket] = parts_.parameters.lend_storages(bucket);
    }
    add_holder(bucket);
  }
  ++num_held_;
}

void ParameterGatherer::let_go(const std::vector<int>& parameters) {
  if (num_held_ == 0) {
    return;
  }
  --num_held_;
  std::set<int> buckets;
  for (const int parameter : parameters) {
    buckets.insert(parts_.shards.buckets().bucket_of(parameter));
  }
  for (const int bucket : buckets) {
    if (!rests_whole(bucket)) {
      remove_holder(bucket);
    }
  }
}

// What is read outside of its unit in this forward too need not be gathered a second time.
void ParameterGatherer::remove_holder(int bucket) {
  Slot& it = slot(bucket);
  if (it.num_holders > 1) {
    --it.num_holders;
    return;
  }
  if (it.is_external && is_inside() && externals_.insert(bucket).second) {
    return;
  }
  it.num_holders = 0;
  release(bucket);
}

void ParameterGatherer::let_rest(int bucket) {
  if (!rests_whole(bucket) && slot(bucket).num_holders == 0) {
    release(bucket);
  }
}

void ParameterGatherer::keep(int bucket) {
  if (!rests_whole(bucket) && is_whole(bucket)) {
    tell_failure_of([&] { parts_.gathering.store(bucket, parts_.parameters.bucket(bucket)); });
  }
}

void ParameterGatherer::release(int bucket) {
  if (!is_whole(bucket)) {
    return;
  }
  const std::vector<int> edited = parts_.parameters.take_edits_of(bucket);
  if (!edited.empty()) {
    edited_.insert(edited.begin(), edited.end());
    unkept_.insert(bucket);
  }
  if (unkept_.contains(bucket)) {
    keep(bucket);
    unkept_.erase(bucket);
  }
  if (const auto lent = lent_.find(bucket); lent != lent_.end()) {
    parts_.parameters.return_storages(bucket, lent->second);
    lent_.erase(lent);
  }
  released_.release(bucket);
  parts_.parameters.take_memory(bucket);
}

std::vector<int> ParameterGatherer::take_edited() {
  const std::set<int> edited = std::exchange(edited_, {});
  return {edited.begin(), edited.end()};
}

void ParameterGatherer::drop_coming(int bucket) {
  Slot& it = slot(bucket);
  if (it.coming.defined()) {
    it.pending.reset();
    settle(bucket);  // The shard may still be on its way into it.
    it.coming = at::Tensor();
  }
}

void ParameterGatherer::forget_holders() {
  std::fill(num_forward_.begin(), num_forward_.end(), 0);
  std::fill(num_backward_.begin(), num_backward_.end(), 0);
  externals_.clear();
  in_backward_ = false;
}

void ParameterGatherer::rest_all() {
  PANNIER_CHECK(num_held_ == 0, fmt::format("{} holds of parameters in a step", num_held_));
  if (const at::Tensor wrong = std::exchange(mismatch_, at::Tensor()); wrong.defined() && wrong.item<bool>()) {
    throw CollectiveError("the ranks gathered different parameters: their models took different ways");
  }
  forget_holders();
  for (int b = 0; b < static_cast<int>(slots_.size()); ++b) {
    if (!rests_whole(b)) {
      slot(b).num_holders = 0;
      drop_coming(b);
      release(b);
      parts_.parameters.refuse_aliases(b);
    }
  }
  parts_.gathering.expect_changes(num_trained_buckets_);
}

}  // namespace pannier
