#include "pannier/device/memory_meter.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

thread_local Owner current_owner = Owner::kActivations;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// Stands before the data, in what torch's own allocator gave, and says how it was counted. As large as the alignment
// that torch promises, so that the data keeps it.
struct alignas(c10::gAlignment) MemoryMeter::Block {
  MemoryMeter* meter;
  std::size_t nbytes;
  Owner owner;
};

const char* to_string(Owner owner) noexcept {
  switch (owner) {
    case Owner::kParameters:
      return "parameters";
    case Owner::kGradients:
      return "gradients";
    case Owner::kOptimizerStates:
      return "optimizer states";
    case Owner::kActivations:
      break;
  }
  return "activations";
}

MemoryMeter& MemoryMeter::install() {
  // Lives for ever, since tensors freed at exit still call it; so it is released from its owner on purpose.
  static MemoryMeter& meter = *[] {
    auto created = std::unique_ptr<MemoryMeter>(new MemoryMeter(*c10::GetAllocator(c10::DeviceType::CPU)));
    c10::SetAllocator(c10::DeviceType::CPU, created.get(), /*priority=*/100);
    return created.release();
  }();
  return meter;
}

// The context of a DataPtr must be the data itself, and nothing else: oneDNN and others allocate raw memory through it.
c10::DataPtr MemoryMeter::allocate(std::size_t nbytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (nbytes == 0) {
    return {nullptr, nullptr, &MemoryMeter::free_block, cpu};
  }
  const Owner owner = current_owner;
  count(owner, nbytes);
  try {
    void* const raw = inner_.raw_allocate(sizeof(Block) + nbytes);
    void* const data = new (raw) Block{this, nbytes, owner} + 1;
    return {data, data, &MemoryMeter::free_block, cpu};
  } catch (const c10::Error&) {
    uncount(owner, nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false,
                     fmt::format("CPU out of memory. Tried to allocate {} for {}: the system has no more to give.",
                                 format_bytes(nbytes), to_string(owner)));
  }
}

void MemoryMeter::copy_data(void* dest, const void* src, std::size_t count) const {
  default_copy_data(dest, src, count);
}

void MemoryMeter::free_block(void* data) noexcept {
  if (data == nullptr) {
    return;
  }
  Block* const block = static_cast<Block*>(data) - 1;
  MemoryMeter& meter = *block->meter;
  meter.uncount(block->owner, block->nbytes);
  meter.inner_.raw_deallocate(block);
}

void MemoryMeter::count(Owner owner, std::size_t nbytes) {
  const std::lock_guard lock(counts_mutex_);
  if (memory_.cap != 0 && memory_.current + nbytes > memory_.cap) {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        fmt::format("CPU out of memory. Tried to allocate {} for {}: {} of {} in use ({} parameters, {} gradients, {} "
                    "optimizer states, {} activations).",
                    format_bytes(nbytes), to_string(owner), format_bytes(memory_.current), format_bytes(memory_.cap),
                    format_bytes(memory_.current_by_owner[0]), format_bytes(memory_.current_by_owner[1]),
                    format_bytes(memory_.current_by_owner[2]), format_bytes(memory_.current_by_owner[3])));
  }
  const auto index = static_cast<std::size_t>(owner);
  memory_.current += nbytes;
  memory_.current_by_owner[index] += nbytes;
  memory_.peak = std::max(memory_.peak, memory_.current);
  memory_.peak_by_owner[index] = std::max(memory_.peak_by_owner[index], memory_.current_by_owner[index]);
  sample();
}

void MemoryMeter::uncount(Owner owner, std::size_t nbytes) noexcept {
  const std::lock_guard lock(counts_mutex_);
  memory_.current -= nbytes;
  memory_.current_by_owner[static_cast<std::size_t>(owner)] -= nbytes;
  sample();
}

void MemoryMeter::sample() noexcept {
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

void MemoryMeter::reassign(const c10::DataPtr& data, Owner owner) noexcept {
  if (!counts(data) || data.get() == nullptr) {
    return;
  }
  Block* const block = static_cast<Block*>(data.get_context()) - 1;
  const std::lock_guard lock(counts_mutex_);
  memory_.current_by_owner[static_cast<std::size_t>(block->owner)] -= block->nbytes;
  const auto index = static_cast<std::size_t>(owner);
  memory_.current_by_owner[index] += block->nbytes;
  memory_.peak_by_owner[index] = std::max(memory_.peak_by_owner[index], memory_.current_by_owner[index]);
  block->owner = owner;
  sample();
}

void MemoryMeter::add_cap(std::size_t nbytes) {
  const std::lock_guard lock(counts_mutex_);
  if (memory_.current > nbytes) {
    throw ConfigError(fmt::format("a device memory cap of {} is below the {} in use", format_bytes(nbytes),
                                  format_bytes(memory_.current)));
  }
  caps_.insert(nbytes);
  memory_.cap = *caps_.begin();
}

void MemoryMeter::remove_cap(std::size_t nbytes) noexcept {
  const std::lock_guard lock(counts_mutex_);
  if (const auto found = caps_.find(nbytes); found != caps_.end()) {
    caps_.erase(found);
  }
  memory_.cap = caps_.empty() ? 0 : *caps_.begin();
}

DeviceMemory MemoryMeter::memory() const {
  const std::lock_guard lock(counts_mutex_);
  return memory_;
}

void MemoryMeter::reset_peak() {
  const std::lock_guard lock(counts_mutex_);
  memory_.peak = memory_.current;
  memory_.peak_by_owner = memory_.current_by_owner;
}

void MemoryMeter::start_timeline(std::size_t resolution_bytes) {
  const std::lock_guard lock(counts_mutex_);
  recording_ = true;
  resolution_ = resolution_bytes;
  last_sampled_ = memory_.current_by_owner;
  started_seconds_ = now_seconds();
  samples_.assign(1, {0.0, memory_.current_by_owner});
}

std::vector<MemorySample> MemoryMeter::take_timeline() {
  const std::lock_guard lock(counts_mutex_);
  recording_ = false;
  return std::exchange(samples_, {});
}

OwnerScope::OwnerScope(Owner owner) noexcept : before_(std::exchange(current_owner, owner)) {}
OwnerScope::~OwnerScope() { current_owner = before_; }

}  // namespace pannier
