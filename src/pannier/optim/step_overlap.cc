#include "pannier/optim/step_overlap.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"

namespace pannier {

StepOverlap::StepOverlap(StepOverlapParts parts, const HostUpdaterOptions& options)
    : parts_(parts),
      released_(
          parts.layout, parts.parameters,
          {.read = "while the engine was still updating it: with \"overlap_step\" it is in place when the forward "
                   "of its module begins. Call engine.synchronize() before anything else reads it, and take views "
                   "and copies of it after that",
           .replaced = "while the engine was still updating it, and is not taken: the parameter has the update's "
                       "values. Call engine.synchronize() before replacing data"}),
      updater_(parts.up, parts.layout.num_buckets(), options),
      first_use_(static_cast<std::size_t>(parts.layout.num_buckets())),
      is_under_way_(first_use_.size()) {
  for (int b = 0; b < parts.layout.num_buckets(); ++b) {
    lent_.emplace_back();
  }
}

void StepOverlap::set_units(const std::vector<std::vector<int>>& parameters_of) {
  wait_for_all();
  buckets_of_.clear();
  for (const std::vector<int>& parameters : parameters_of) {
    std::vector<int>& buckets = buckets_of_.emplace_back();
    for (const int parameter : parameters) {
      buckets.push_back(parts_.layout.bucket_of(parameter));
    }
    std::sort(buckets.begin(), buckets.end());
    buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  }
  order_.assign(buckets_of_.size(), -1);
  num_ticked_ = 0;
}

// What no unit of the last window is known to read may be read by anybody (a weight that is used without its module
// being called), so it must be there when forward begins.
std::vector<int> StepOverlap::first_uses() const {
  constexpr int kNever = std::numeric_limits<int>::max();
  std::vector<int> result(first_use_.size(), kNever);
  for (std::size_t unit = 0; unit < buckets_of_.size(); ++unit) {
    const int use = unit == 0 ? 0 : order_[unit] + 1;
    for (const int bucket : buckets_of_[unit]) {
      int& first = result[static_cast<std::size_t>(bucket)];
      first = std::min(first, use);
    }
  }
  std::replace(result.begin(), result.end(), kNever, 0);
  return result;
}

bool StepOverlap::is_lent_later(int bucket) const {
  return parts_.routes.update_way(bucket).states->home() == Home::kNvme;
}

// Nothing below the loop throws but for want of memory.
std::vector<BucketUpdate> StepOverlap::prepared(const std::vector<int>& buckets,
                                                const UpdatePipeline::Coefficients& coefficients) {
  std::vector<BucketUpdate> updates;
  std::vector<std::pair<int, Lease>> leases;
  std::vector<ChunkId> chunks;
  StateStore* disk = nullptr;
  for (const int b : buckets) {
    if (is_lent_later(b)) {
      for (BucketUpdate& update : parts_.pipeline.prepare_chunks(b, coefficients)) {
        disk = update.later->store;
        chunks.push_back(update.later->chunk);
        updates.push_back(std::move(update));
      }
    } else if (auto one = parts_.pipeline.prepare(b, coefficients)) {
      leases.emplace_back(b, std::move(one->lease));
      updates.push_back(std::move(one->update));
    }
    parts_.pipeline.drop_gradients(b, coefficients);  // Where they lie, nothing is written before the next backward.
  }
  for (auto& [bucket, lease] : leases) {
    lent_[static_cast<std::size_t>(bucket)].emplace(std::move(lease));
  }
  if (disk != nullptr) {
    disk->expect(std::move(chunks));
  }
  return updates;
}

void StepOverlap::begin(const UpdatePipeline::Coefficients& coefficients, float grad_factor) {
  std::vector<int> buckets;
  std::vector<int> at_once;
  first_use_ = first_uses();
  std::fill(order_.begin(), order_.end(), -1);
  num_ticked_ = 0;
  const std::uint32_t skip = 0;
  for (int b = parts_.layout.num_buckets() - 1; b >= 0; --b) {
    if (parts_.routes.route(b) != UpdateRoute::kHost) {
      continue;
    }
    const int aliased = parts_.residence.rests_whole(b) ? released_.aliased(b) : -1;
    if (aliased >= 0) {
      note_alias(aliased);
    }
    if (aliased >= 0 && !is_lent_later(b)) {
      (void)parts_.pipeline.update_bucket(b, coefficients, {&grad_factor, &skip});
    } else {
      (aliased >= 0 ? at_once : buckets).push_back(b);
    }
  }
  std::stable_sort(buckets.begin(), buckets.end(), [this](int left, int right) {
    return first_use_[static_cast<std::size_t>(left)] < first_use_[static_cast<std::size_t>(right)];
  });
  buckets.insert(buckets.begin(), at_once.begin(), at_once.end());
  std::vector<BucketUpdate> updates = prepared(buckets, coefficients);
  for (const BucketUpdate& update : updates) {
    is_under_way_[static_cast<std::size_t>(update.bucket)] = true;
    const bool stays = std::find(at_once.begin(), at_once.end(), update.bucket) != at_once.end();
    if (update.is_last && !stays && parts_.residence.rests_whole(update.bucket)) {
      released_.release(update.bucket);
    }
  }
  at_once_ = std::move(at_once);
  updater_.start(std::move(updates), grad_factor, parts_.device.record(Queue::kCompute));
}

void StepOverlap::finish_begin() {
  for (const int bucket : at_once_) {
    wait_for(bucket);
  }
  at_once_.clear();
}

bool StepOverlap::is_idle() const {
  return std::find(is_under_way_.begin(), is_under_way_.end(), true) == is_under_way_.end();
}

void StepOverlap::tick(int unit) {
  if (buckets_of_.empty()) {
    wait_for_all();
    return;
  }
  const auto index = static_cast<std::size_t>(unit);
  if (unit == 0) {
    for (int b = static_cast<int>(first_use_.size()) - 1; b >= 0; --b) {
      if (first_use_[static_cast<std::size_t>(b)] == 0) {
        wait_for(b);
      }
    }
  }
  if (unit < 0 || index >= buckets_of_.size()) {
    return;
  }
  if (order_[index] < 0) {
    order_[index] = num_ticked_++;
  }
  for (const int bucket : buckets_of_[index]) {
    wait_for(bucket);
  }
}

void StepOverlap::wait_for(int bucket) {
  const auto index = static_cast<std::size_t>(bucket);
  if (!is_under_way_[index]) {
    return;
  }
  parts_.device.wait(Queue::kCompute, updater_.wait_issued(bucket));
  is_under_way_[index] = false;
  lent_[index].reset();
  if (released_.is_released(bucket)) {
    released_.restore(bucket);
  }
}

void StepOverlap::wait_for_all() {
  std::exception_ptr first;
  for (int b = static_cast<int>(first_use_.size()) - 1; b >= 0; --b) {
    try {
      wait_for(b);
    } catch (const IoError&) {
      throw;  // Who waits again has it tried again.
    } catch (...) {
      first = first ? first : std::current_exception();
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void StepOverlap::wait_for_updates() {
  for (int b = 0; b < static_cast<int>(first_use_.size()); ++b) {
    if (is_under_way_[static_cast<std::size_t>(b)]) {
      (void)updater_.wait_issued(b);
    }
  }
}

void StepOverlap::close() noexcept {
  try {
    wait_for_all();
  } catch (const std::exception& error) {
    log::warning(fmt::format("the end of an engine: {}", error.what()));
  }
  updater_.close();
  lent_.clear();
}

void StepOverlap::note_alias(int parameter) {
  if (!std::exchange(noted_alias_, true)) {
    log::warning(fmt::format(
        "something refers to the memory of parameter {} (a detached tensor, a state dict, a graph that is kept), so "
        "step() waits for its bucket and for all others of the kind; with copies (.clone()) it would not have to",
        parts_.parameters.name(parameter)));
  }
}

}  // namespace pannier
