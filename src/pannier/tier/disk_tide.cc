#include "pannier/tier/disk_tide.h"

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

constexpr std::size_t kOnDevice = 2;

void* first_array(const StateView& states) {
  return states.state1 != nullptr ? static_cast<void*>(states.state1) : states.rest;
}

// Bytes from a chunk's first array to the parameter behind the last.
std::size_t state_nbytes(const StateShape& shape, std::int64_t numel) {
  return host_bucket_layout(shape, numel).offsets[3];
}

}  // namespace

DiskTide::DiskTide(DiskTideParts parts)
    : StateStore(parts.bucket_numels, parts.disk.staging().chunk_numel),
      parts_(std::move(parts)),
      slots_(std::min(kOnDevice, parts_.disk.staging().num_buffers + parts_.disk.staging().host_chunks)) {}

DiskTide::~DiskTide() {
  for (const Slot& slot : slots_) {
    for (const TransferPtr& transfer : {slot.up, slot.down}) {
      if (transfer) {
        transfer->wait_ended();  // Of buffers that go now.
      }
    }
  }
}

CopyRun DiskTide::up_run(const Slot& slot) const {
  const StateView& staged = slot.staged->view();
  return {slot.buffer.data_ptr(), first_array(staged), state_nbytes(parts_.shape, staged.range.numel())};
}

void DiskTide::finish(Slot& slot) {
  if (slot.down) {
    std::exchange(slot.down, nullptr)->wait_done();
  } else if (slot.up) {
    slot.up->wait_done();
  }
  slot.up = nullptr;
  slot.staged.reset();
}

StateView DiskTide::acquire(ChunkId chunk, Access access) {
  if (broken_) {
    std::rethrow_exception(broken_);
  }
  Slot& slot = slots_[next_];
  finish(slot);
  Lease staged = parts_.disk.lease(chunk, access);
  const at::Tensor params = parts_.param_bucket(chunk.bucket);
  if (!slot.buffer.defined()) {
    const std::size_t nbytes = state_nbytes(parts_.shape, parts_.disk.staging().chunk_numel);
    slot.buffer = parts_.device.allocate(static_cast<std::int64_t>(nbytes), at::kByte, Owner::kStreamedStates);
  }
  slot.staged.emplace(std::move(staged));
  next_ = (next_ + 1) % slots_.size();
  // The allocator may hand out memory that work already queued still uses, so the copy waits for that work.
  slot.up = parts_.up.push({up_run(slot)}, {parts_.device.record(Queue::kCompute)}, nullptr, "states", chunk.bucket);
  parts_.device.wait(Queue::kCompute, slot.up->wait_issued());
  const ElementRange elements = range(chunk);
  return view_of(parts_.shape, host_bucket_layout(parts_.shape, elements.numel()), elements,
                 static_cast<std::byte*>(slot.buffer.data_ptr()),
                 static_cast<std::byte*>(params.data_ptr()) + nbytes_of(elements.begin, parts_.shape.param_nbytes));
}

void DiskTide::release(ChunkId chunk, Access access, TransferPtr /*reader*/) noexcept {
  const auto slot = std::find_if(slots_.begin(), slots_.end(),
                                 [&](const Slot& one) { return one.staged && one.staged->chunk() == chunk; });
  if (slot == slots_.end() || access == Access::kRead) {
    return;
  }
  try {
    const CopyRun up = up_run(*slot);
    slot->down = parts_.down.push({{const_cast<void*>(up.from), up.to, up.nbytes}},
                                  {parts_.device.record(Queue::kCompute)}, slot->up, "states", chunk.bucket);
  } catch (...) {
    broken_ = std::current_exception();
  }
}

void DiskTide::settle() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    finish(slots_[(next_ + i) % slots_.size()]);
  }
}

}  // namespace pannier
