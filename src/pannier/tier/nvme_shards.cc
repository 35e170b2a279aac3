#include "pannier/tier/nvme_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

// The elements of `flat` that a chunk has.
std::byte* address_in(const at::Tensor& flat, const ElementRange& range) {
  return static_cast<std::byte*>(flat.data_ptr()) + nbytes_of(range.begin, flat.element_size());
}

}  // namespace

NvmeShards::NvmeShards(Device& device, HostMemory& memory, Mover& up, Mover& down, at::ScalarType dtype,
                       const std::vector<std::int64_t>& numels, const NvmeStateOptions& options)
    : device_(device),
      up_(up),
      down_(down),
      dtype_(dtype),
      numels_(numels),
      slots_(numels.size()),
      disk_(memory, parameter_shape(c10::elementSize(dtype)), numels, options) {}

// Chunks are expected once, when they are needed first.
void NvmeShards::expect_chunks() {
  std::vector<bool> is_seen(slots_.size());
  std::vector<ChunkId> chunks;
  for (const std::vector<int>* buckets : {&rising_, &expected_}) {
    for (const int bucket : *buckets) {
      if (is_seen.at(static_cast<std::size_t>(bucket))) {
        continue;
      }
      is_seen[static_cast<std::size_t>(bucket)] = true;
      for (int c = 0; c < disk_.num_chunks(bucket); ++c) {
        chunks.push_back({bucket, c});
      }
    }
  }
  disk_.expect(std::move(chunks));
}

void NvmeShards::expect(std::vector<int> buckets) {
  expected_ = std::move(buckets);
  expect_chunks();
}

void NvmeShards::raise(int bucket, const at::Tensor& to) {
  if (to.numel() == 0) {
    return;
  }
  PANNIER_CHECK(!at(bucket).to.defined(), fmt::format("bucket {} is on its way up already", bucket));
  end_writes(bucket);
  at(bucket).to = to;
  rising_.push_back(bucket);
  expect_chunks();
}

void NvmeShards::finish_raise(int bucket) {
  Slot& slot = at(bucket);
  if (!slot.to.defined()) {
    return;
  }
  // `to` may be memory that the device's earlier work still uses.
  const EventPtr is_free = device_.record(Queue::kCompute);
  for (int c = 0; c < disk_.num_chunks(bucket); ++c) {
    Lease lease = disk_.lease({bucket, c}, Access::kRead);
    const StateView& view = lease.view();
    slot.read = up_.push_urgent(
        {{address_in(slot.to, view.range), view.param, nbytes_of(view.range.numel(), slot.to.element_size())}},
        {is_free}, nullptr, "parameters up", bucket);
    lease.is_read_by(slot.read);
  }
  device_.wait(Queue::kCompute, slot.read->wait_issued());
  end_raise(bucket);
}

void NvmeShards::end_raise(int bucket) {
  at(bucket).to = at::Tensor();
  std::erase(rising_, bucket);
  std::erase(expected_, bucket);
}

// Chunk by chunk, so that two staging buffers suffice: one that is filled, one that is written.
void NvmeShards::store(int bucket, const at::Tensor& from) {
  if (from.numel() == 0) {
    return;
  }
  settle(bucket);
  for (int c = 0; c < disk_.num_chunks(bucket); ++c) {
    const Lease lease = disk_.lease({bucket, c}, Access::kOverwrite);
    const StateView& view = lease.view();
    down_
        .push_urgent({{view.param, address_in(from, view.range), nbytes_of(view.range.numel(), from.element_size())}},
                     {device_.record(Queue::kCompute)}, nullptr, "parameters down", bucket)
        ->wait_done();
  }
}

at::Tensor NvmeShards::own(int bucket) {
  Slot& slot = at(bucket);
  if (!slot.lent.defined()) {
    const at::Tensor lent = device_.allocate(numels_.at(static_cast<std::size_t>(bucket)), dtype_, Owner::kParameters);
    try {
      raise(bucket, lent);
      finish_raise(bucket);
    } catch (const std::exception&) {
      settle(bucket);
      throw;
    }
    slot.lent = lent;
  }
  return slot.lent;
}

at::Tensor NvmeShards::own_anew(int bucket) {
  Slot& slot = at(bucket);
  if (!slot.lent.defined()) {
    slot.lent = device_.allocate(numels_.at(static_cast<std::size_t>(bucket)), dtype_, Owner::kParameters);
  }
  return slot.lent;
}

void NvmeShards::put_back(int bucket) {
  if (Slot& slot = at(bucket); slot.lent.defined()) {
    store(bucket, slot.lent);
    slot.lent = at::Tensor();
  }
}

void NvmeShards::settle(int bucket) {
  if (const TransferPtr read = std::exchange(at(bucket).read, nullptr)) {
    read->wait_done();
  }
  if (at(bucket).to.defined()) {
    end_raise(bucket);
    expect_chunks();
  }
}

}  // namespace pannier
