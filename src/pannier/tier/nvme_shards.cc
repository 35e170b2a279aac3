#include "pannier/tier/nvme_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

// Whoever names what rests in a shard knows its elements.
NvmeStateOptions with_label_in_units(const NvmeStateOptions& given, const std::vector<RestingShard>& shards) {
  NvmeStateOptions options = given;
  if (given.label) {
    options.label = [shards, label = given.label, unit = unit_nbytes_of(shards)](int bucket,
                                                                                 const ElementRange& range) {
      const auto units =
          static_cast<std::int64_t>(c10::elementSize(shards.at(static_cast<std::size_t>(bucket)).dtype) / unit);
      return label(bucket, {range.begin / units, (range.end + units - 1) / units});
    };
  }
  return options;
}

}  // namespace

std::size_t unit_nbytes_of(const std::vector<RestingShard>& shards) {
  std::size_t narrowest = 0;
  for (const RestingShard& shard : shards) {
    const std::size_t width = c10::elementSize(shard.dtype);
    narrowest = narrowest == 0 || width < narrowest ? width : narrowest;
  }
  return std::max<std::size_t>(narrowest, 1);
}

std::vector<std::int64_t> in_units(const std::vector<RestingShard>& shards) {
  const std::size_t unit = unit_nbytes_of(shards);
  std::vector<std::int64_t> numels;
  for (const RestingShard& shard : shards) {
    numels.push_back(static_cast<std::int64_t>(shard.nbytes() / unit));
  }
  return numels;
}

NvmeShards::NvmeShards(Device& device, HostMemory& memory, Mover& up, Mover& down,
                       const std::vector<RestingShard>& shards, const NvmeStateOptions& options)
    : device_(device),
      up_(up),
      down_(down),
      shards_(shards),
      unit_nbytes_(unit_nbytes_of(shards)),
      slots_(shards.size()),
      disk_(memory, parameter_shape(unit_nbytes_), in_units(shards), with_label_in_units(options, shards)) {}

at::Tensor NvmeShards::new_shard(int bucket) {
  const RestingShard& shard = shards_.at(static_cast<std::size_t>(bucket));
  return device_.allocate(shard.numel, shard.dtype, Owner::kParameters);
}

// Between a shard and the chunk of it that the view has.
std::vector<CopyRun> NvmeShards::run_of(const at::Tensor& flat, const StateView& view, bool is_up) const {
  std::byte* const there = static_cast<std::byte*>(flat.data_ptr()) + nbytes_of(view.range.begin, unit_nbytes_);
  const std::size_t nbytes = nbytes_of(view.range.numel(), unit_nbytes_);
  return {is_up ? CopyRun{there, view.param, nbytes} : CopyRun{view.param, there, nbytes}};
}

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
    slot.read = up_.push_urgent(run_of(slot.to, view, true), {is_free}, nullptr, "parameters up", bucket);
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
    down_.push_urgent(run_of(from, view, false), {device_.record(Queue::kCompute)}, nullptr, "parameters down", bucket)
        ->wait_done();
  }
}

at::Tensor NvmeShards::own(int bucket) {
  Slot& slot = at(bucket);
  if (!slot.lent.defined()) {
    const at::Tensor lent = new_shard(bucket);
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
    slot.lent = new_shard(bucket);
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
