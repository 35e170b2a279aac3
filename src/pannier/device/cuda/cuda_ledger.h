// The account of one GPU's memory, kept by a listener at torch's caching allocator: every block that it serves, to
// whomever, comes by here, so the owners and peaks are measured by the allocator that served them.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "pannier/device/memory_ledger.h"

namespace pannier {

/// One GPU's account. Thread-safe. Lives for ever, since a listener can't be taken off the allocator again.
class CudaLedger {
 public:
  /// The account of a GPU; listens from the first call on. What was allocated before counts for kActivations.
  static CudaLedger& of(c10::DeviceIndex device);

  [[nodiscard]] MemoryLedger& ledger() noexcept { return ledger_; }
  /// The largest block that anybody has asked for.
  [[nodiscard]] std::size_t largest_nbytes() const noexcept { return largest_nbytes_; }
  /// Counts the block at `address` for another owner. A block that began before the listening is left alone.
  void reassign(const void* address, Owner owner);

 private:
  struct Block {
    std::size_t nbytes = 0;
    Owner owner = Owner::kActivations;
  };
  explicit CudaLedger(c10::DeviceIndex device);
  void allocated(std::size_t address, std::size_t nbytes);
  void freed(std::size_t address, std::size_t nbytes);

  c10::DeviceIndex device_;
  MemoryLedger ledger_{"CUDA"};
  std::mutex blocks_mutex_;  ///< Guards blocks_. Taken under the allocator's lock; calls nothing that takes that.
  std::unordered_map<std::size_t, Block> blocks_;
  std::atomic<std::size_t> largest_nbytes_ = 0;
};

}  // namespace pannier
