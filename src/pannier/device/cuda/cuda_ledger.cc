#include "pannier/device/cuda/cuda_ledger.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <map>
#include <memory>

namespace pannier {
namespace {

using c10::CachingDeviceAllocator::TraceEntry;

// The allocator rounds requests up to this; its own counts are of rounded blocks.
std::size_t round_block(std::size_t nbytes) { return (nbytes + 511) / 512 * 512; }

}  // namespace

CudaLedger& CudaLedger::of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, std::unique_ptr<CudaLedger>>& ledgers =
      *std::make_unique<std::map<c10::DeviceIndex, std::unique_ptr<CudaLedger>>>().release();
  const std::lock_guard lock(mutex);
  auto& ledger = ledgers[device];
  if (!ledger) {
    ledger.reset(new CudaLedger(device));
  }
  return *ledger;
}

CudaLedger::CudaLedger(c10::DeviceIndex device) : device_(device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  ledger_.add(Owner::kActivations, static_cast<std::size_t>(stats.allocated_bytes[0].current));
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([this](const TraceEntry& entry) {
    if (entry.device_ != device_) {
      return;
    }
    if (entry.action_ == TraceEntry::ALLOC) {
      allocated(entry.addr_, round_block(entry.size_));
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
      freed(entry.addr_, round_block(entry.size_));
    }
  });
}

void CudaLedger::allocated(std::size_t address, std::size_t nbytes) {
  const Owner owner = current_owner();
  const std::lock_guard lock(blocks_mutex_);
  largest_nbytes_ = std::max(largest_nbytes_.load(), nbytes);
  blocks_[address] = {nbytes, owner};
  ledger_.add(owner, nbytes);
}

void CudaLedger::freed(std::size_t address, std::size_t nbytes) {
  const std::lock_guard lock(blocks_mutex_);
  const auto found = blocks_.find(address);
  if (found == blocks_.end()) {
    ledger_.remove(Owner::kActivations, nbytes);
    return;
  }
  ledger_.remove(found->second.owner, found->second.nbytes);
  blocks_.erase(found);
}

void CudaLedger::reassign(const void* address, Owner owner) {
  const std::lock_guard lock(blocks_mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::size_t>(address));
  if (found != blocks_.end()) {
    ledger_.move(found->second.owner, owner, found->second.nbytes);
    found->second.owner = owner;
  }
}

}  // namespace pannier
