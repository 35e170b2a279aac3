#include "pannier/device/memory_meter.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <memory>
#include <new>

#include "pannier/base/units.h"

namespace pannier {

// Stands before the data, in what torch's own allocator gave, and says how it was counted. As large as the alignment
// that torch promises, so that the data keeps it.
struct alignas(c10::gAlignment) MemoryMeter::Block {
  MemoryMeter* meter;
  std::size_t nbytes;
  Owner owner;
};

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
  const Owner owner = current_owner();
  ledger_.add(owner, nbytes);
  try {
    void* const raw = inner_.raw_allocate(sizeof(Block) + nbytes);
    void* const data = new (raw) Block{this, nbytes, owner} + 1;
    return {data, data, &MemoryMeter::free_block, cpu};
  } catch (const c10::Error&) {
    ledger_.remove(owner, nbytes);
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
  meter.ledger_.remove(block->owner, block->nbytes);
  meter.inner_.raw_deallocate(block);
}

void MemoryMeter::reassign(const c10::DataPtr& data, Owner owner) noexcept {
  if (!counts(data) || data.get() == nullptr) {
    return;
  }
  Block* const block = static_cast<Block*>(data.get_context()) - 1;
  ledger_.move(block->owner, owner, block->nbytes);
  block->owner = owner;
}

}  // namespace pannier
