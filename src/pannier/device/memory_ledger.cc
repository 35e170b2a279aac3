#include "pannier/device/memory_ledger.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

thread_local Owner thread_owner = Owner::kActivations;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

const char* to_string(Owner owner) noexcept {
  switch (owner) {
    case Owner::kParameters:
      return "parameters";
    case Owner::kGradients:
      return "gradients";
    case Owner::kOptimizerStates:
      return "optimizer states";
    case Owner::kStreamedStates:
      return "streamed states";
    case Owner::kActivations:
      break;
  }
  return "activations";
}

void MemoryLedger::add(Owner owner, std::size_t nbytes) {
  const std::lock_guard lock(counts_mutex_);
  if (memory_.cap != 0 && memory_.current + nbytes > memory_.cap) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        fmt::format("{} out of memory. Tried to allocate {} for {}: {} of {} in use ({} parameters, {} gradients, {} "
                    "optimizer states, {} activations, {} streamed states).",
                    device_, format_bytes(nbytes), to_string(owner), format_bytes(memory_.current),
                    format_bytes(memory_.cap), format_bytes(memory_.current_by_owner[0]),
                    format_bytes(memory_.current_by_owner[1]), format_bytes(memory_.current_by_owner[2]),
                    format_bytes(memory_.current_by_owner[3]), format_bytes(memory_.current_by_owner[4])));
  }
  memory_.current += nbytes;
  memory_.peak = std::max(memory_.peak, memory_.current);
  rise(static_cast<std::size_t>(owner), nbytes);
  recent_peak_ = std::max(recent_peak_, without_streamed());
  sample();
}

std::size_t MemoryLedger::without_streamed() const noexcept {
  return memory_.current - memory_.current_by_owner[static_cast<std::size_t>(Owner::kStreamedStates)];
}

void MemoryLedger::rise(std::size_t index, std::size_t nbytes) noexcept {
  memory_.current_by_owner[index] += nbytes;
  memory_.peak_by_owner[index] = std::max(memory_.peak_by_owner[index], memory_.current_by_owner[index]);
}

void MemoryLedger::remove(Owner owner, std::size_t nbytes) noexcept {
  const std::lock_guard lock(counts_mutex_);
  memory_.current -= nbytes;
  memory_.current_by_owner[static_cast<std::size_t>(owner)] -= nbytes;
  sample();
}

void MemoryLedger::move(Owner from, Owner to, std::size_t nbytes) noexcept {
  const std::lock_guard lock(counts_mutex_);
  memory_.current_by_owner[static_cast<std::size_t>(from)] -= nbytes;
  rise(static_cast<std::size_t>(to), nbytes);
  sample();
}

void MemoryLedger::sample() noexcept {
  if (!recording_) {
    return;
  }
  std::size_t moved = 0;  // Over owners, so that memory which only changes hands is seen too.
  for (std::size_t i = 0; i < kNumOwners; ++i) {
    const auto [less, more] = std::minmax(last_sampled_[i], memory_.current_by_owner[i]);
    moved += more - less;
  }
  if (moved < resolution_) {
    return;
  }
  last_sampled_ = memory_.current_by_owner;
  try {
    samples_.push_back({now_seconds() - started_seconds_, memory_.current_by_owner});
  } catch (const std::bad_alloc&) {
    recording_ = false;  // A run must not die of its own recording.
  }
}

void MemoryLedger::add_cap(std::size_t nbytes) {
  const std::lock_guard lock(counts_mutex_);
  if (memory_.current > nbytes) {
    throw ConfigError(fmt::format("a device memory cap of {} is below the {} in use", format_bytes(nbytes),
                                  format_bytes(memory_.current)));
  }
  caps_.insert(nbytes);
  memory_.cap = *caps_.begin();
}

void MemoryLedger::remove_cap(std::size_t nbytes) noexcept {
  const std::lock_guard lock(counts_mutex_);
  if (const auto found = caps_.find(nbytes); found != caps_.end()) {
    caps_.erase(found);
  }
  memory_.cap = caps_.empty() ? 0 : *caps_.begin();
}

DeviceMemory MemoryLedger::memory() const {
  const std::lock_guard lock(counts_mutex_);
  return memory_;
}

void MemoryLedger::reset_peak() {
  const std::lock_guard lock(counts_mutex_);
  memory_.peak = memory_.current;
  memory_.peak_by_owner = memory_.current_by_owner;
}

std::size_t MemoryLedger::take_peak() {
  const std::lock_guard lock(counts_mutex_);
  return std::exchange(recent_peak_, without_streamed());
}

void MemoryLedger::start_timeline(std::size_t resolution_bytes) {
  const std::lock_guard lock(counts_mutex_);
  recording_ = true;
  resolution_ = resolution_bytes;
  last_sampled_ = memory_.current_by_owner;
  started_seconds_ = now_seconds();
  samples_.assign(1, {0.0, memory_.current_by_owner});
}

std::vector<MemorySample> MemoryLedger::take_timeline() {
  const std::lock_guard lock(counts_mutex_);
  recording_ = false;
  return std::exchange(samples_, {});
}

OwnerScope::OwnerScope(Owner owner) noexcept : before_(std::exchange(thread_owner, owner)) {}
OwnerScope::~OwnerScope() { thread_owner = before_; }
Owner current_owner() noexcept { return thread_owner; }

}  // namespace pannier
