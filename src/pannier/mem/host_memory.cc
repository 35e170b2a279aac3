#include "pannier/mem/host_memory.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/hardware/host_info.h"

namespace pannier {
namespace {

// Asks the kernel, and sets aside what the page tables of that many bytes take: 8 bytes for each page of 4096.
std::size_t ask_kernel() {
  const auto available = host_bytes_available(probe_memory());
  return available - available / 512;
}

void use(HostUsage& usage, std::size_t nbytes) {
  usage.current_bytes += nbytes;
  usage.peak_bytes = std::max(usage.peak_bytes, usage.current_bytes);
}

}  // namespace

HostClaim::HostClaim(HostMemory& memory, std::string owner, std::size_t nbytes)
    : memory_(&memory), owner_(std::move(owner)), nbytes_(nbytes), process_(::getpid()) {}

HostClaim::HostClaim(HostClaim&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      owner_(std::exchange(other.owner_, {})),
      nbytes_(std::exchange(other.nbytes_, 0)),
      settled_bytes_(std::exchange(other.settled_bytes_, 0)),
      process_(other.process_) {}

HostClaim& HostClaim::operator=(HostClaim&& other) noexcept {
  if (this != &other) {
    give_back();
    memory_ = std::exchange(other.memory_, nullptr);
    owner_ = std::exchange(other.owner_, {});
    nbytes_ = std::exchange(other.nbytes_, 0);
    settled_bytes_ = std::exchange(other.settled_bytes_, 0);
    process_ = other.process_;
  }
  return *this;
}

HostClaim::~HostClaim() { give_back(); }

void HostClaim::give_back() noexcept {
  // The mutex of a forked child may be held by a thread that does not exist there.
  if (memory_ != nullptr && process_ == ::getpid()) {
    memory_->give_back(owner_, settled_bytes_, nbytes_ - settled_bytes_);
  }
  memory_ = nullptr;
}

void HostClaim::settle(std::size_t nbytes) {
  PANNIER_CHECK(
      memory_ != nullptr && nbytes <= nbytes_ - settled_bytes_,
      fmt::format("{} bytes settled of a claim of {} with {} settled before", nbytes, nbytes_, settled_bytes_));
  memory_->settle(owner_, nbytes);
  settled_bytes_ += nbytes;
}

void HostClaim::recheck() const {
  if (memory_ != nullptr) {
    memory_->recheck(owner_, nbytes_ - settled_bytes_);
  }
}

HostMemory::HostMemory(HostMemoryOptions options) : options_(std::move(options)) {
  if (!options_.bytes_available) {
    options_.bytes_available = ask_kernel;
  }
}

HostClaim HostMemory::claim(const std::string& owner, std::size_t nbytes) {
  std::string name(owner);
  while (true) {
    const Room room = look_at_machine();
    const std::lock_guard lock(account_mutex_);
    if (room.changes != changes_) {
      continue;  // Bytes that settled since then would count neither as used by the machine nor as claimed.
    }
    const auto free = free_bytes_locked(room.machine_bytes);
    if (nbytes > free) {
      throw OutOfMemoryError("host", owner, nbytes, free);
    }
    stats_.by_owner.try_emplace(owner);  // settle and give_back find it and need no memory.
    untouched_bytes_ += nbytes;
    return {*this, std::move(name), nbytes};
  }
}

HostMemory::Room HostMemory::look_at_machine() const {
  Room room;
  {
    const std::lock_guard lock(account_mutex_);
    room.changes = changes_;
  }
  room.machine_bytes = options_.bytes_available();
  return room;
}

std::size_t HostMemory::free_bytes_locked(std::size_t machine_bytes) const {
  const auto in_budget =
      saturating_sub(saturating_sub(options_.budget_bytes, stats_.total.current_bytes), untouched_bytes_);
  return std::min(in_budget, saturating_sub(saturating_sub(machine_bytes, options_.headroom_bytes), untouched_bytes_));
}

std::size_t HostMemory::free_bytes() const {
  while (true) {
    const Room room = look_at_machine();
    const std::lock_guard lock(account_mutex_);
    if (room.changes == changes_) {
      return free_bytes_locked(room.machine_bytes);
    }
  }
}

void HostMemory::recheck(const std::string& owner, std::size_t untouched_bytes) const {
  // Half of the headroom is for what others took since the claim.
  const auto machine_bytes = saturating_sub(options_.bytes_available(), options_.headroom_bytes / 2);
  if (untouched_bytes > machine_bytes) {
    throw OutOfMemoryError("host", owner, untouched_bytes, machine_bytes);
  }
}

void HostMemory::settle(const std::string& owner, std::size_t nbytes) {
  const std::lock_guard lock(account_mutex_);
  ++changes_;
  untouched_bytes_ -= nbytes;
  use(stats_.total, nbytes);
  use(stats_.by_owner.find(owner)->second, nbytes);
}

void HostMemory::give_back(const std::string& owner, std::size_t settled_bytes, std::size_t untouched_bytes) noexcept {
  const std::lock_guard lock(account_mutex_);
  ++changes_;
  untouched_bytes_ -= untouched_bytes;
  stats_.total.current_bytes -= settled_bytes;
  stats_.by_owner.find(owner)->second.current_bytes -= settled_bytes;
}

HostMemoryStats HostMemory::stats() const {
  const std::lock_guard lock(account_mutex_);
  return stats_;
}

std::size_t HostMemory::current_bytes() const {
  const std::lock_guard lock(account_mutex_);
  return stats_.total.current_bytes;
}

std::size_t HostMemory::peak_bytes() const {
  const std::lock_guard lock(account_mutex_);
  return stats_.total.peak_bytes;
}

void HostMemory::reset_peak() {
  const std::lock_guard lock(account_mutex_);
  stats_.total.peak_bytes = stats_.total.current_bytes;
  for (auto& [owner, usage] : stats_.by_owner) {
    usage.peak_bytes = usage.current_bytes;
  }
}

}  // namespace pannier
