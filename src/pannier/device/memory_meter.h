// The meter that makes a machine without a GPU behave like one with a known, finite device memory: torch's CPU
// allocations go through it and count as device memory, by owner, with an optional cap. Host slabs are mapped, not
// allocated by torch, so they do not count.
//
// Not seen, because it never passes torch's allocator: numpy arrays, torch.load(mmap=True), shared memory, and whatever
// was allocated before the meter was installed.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

#include "pannier/device/memory_ledger.h"

namespace pannier {

/// Counts what torch's CPU allocator serves. Thread-safe. There is one, because there is one CPU allocator.
class MemoryMeter final : public c10::Allocator {
 public:
  /// Puts the meter in front of torch's CPU allocator, once; later calls return the same meter, which lives for ever.
  static MemoryMeter& install();

  c10::DataPtr allocate(std::size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &MemoryMeter::free_block; }
  void copy_data(void* dest, const void* src, std::size_t count) const override;

  /// Whether a storage's memory was served, and so counted, by this meter.
  [[nodiscard]] bool counts(const c10::DataPtr& data) const noexcept {
    return data.get_deleter() == &MemoryMeter::free_block;
  }

  /// Counts memory that was served for one owner for another from now on. Memory that is not ours is left alone.
  void reassign(const c10::DataPtr& data, Owner owner) noexcept;

  [[nodiscard]] MemoryLedger& ledger() noexcept { return ledger_; }

 private:
  struct Block;
  explicit MemoryMeter(c10::Allocator& inner) : inner_(inner) {}
  static void free_block(void* data) noexcept;

  c10::Allocator& inner_;
  MemoryLedger ledger_{"CPU"};
};

}  // namespace pannier
