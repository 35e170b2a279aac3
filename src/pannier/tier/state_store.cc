#include "pannier/tier/state_store.h"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

class DeviceStore final : public StateStore {
 public:
  DeviceStore(Device& device, const StateShape& shape, std::vector<std::int64_t> bucket_numels,
              std::function<at::Tensor(int)> param_bucket)
      : StateStore(std::move(bucket_numels)),
        device_(device),
        shape_(shape),
        param_bucket_(std::move(param_bucket)),
        buckets_(static_cast<std::size_t>(num_buckets())) {}

  [[nodiscard]] Home home() const noexcept override { return Home::kDevice; }
  [[nodiscard]] std::optional<StateView> resting(ChunkId chunk) override { return states(chunk); }

 protected:
  [[nodiscard]] StateView acquire(ChunkId chunk, Access /*access*/) override {
    StateView view = states(chunk);
    view.param = param_bucket_(chunk.bucket).data_ptr();
    return view;
  }
  void release(ChunkId /*chunk*/, Access /*access*/, TransferPtr /*reader*/) noexcept override {}

 private:
  struct Slot {
    at::Tensor rest, state1, state2;
  };

  StateView states(ChunkId chunk) {
    auto& slot = buckets_.at(static_cast<std::size_t>(chunk.bucket));
    const std::int64_t numel = range(chunk).numel();
    if (!slot) {
      slot = Slot{zeroed(nbytes_of(numel, shape_.rest_nbytes)), zeroed(nbytes_of(numel, shape_.num_states < 1 ? 0 : 4)),
                  zeroed(nbytes_of(numel, shape_.num_states < 2 ? 0 : 4))};
    }
    return {.range = range(chunk),
            .param = nullptr,
            .rest = slot->rest.defined() ? slot->rest.data_ptr() : nullptr,
            .state1 = slot->state1.defined() ? static_cast<float*>(slot->state1.data_ptr()) : nullptr,
            .state2 = slot->state2.defined() ? static_cast<float*>(slot->state2.data_ptr()) : nullptr};
  }

  at::Tensor zeroed(std::size_t nbytes) {
    if (nbytes == 0) {
      return {};
    }
    at::Tensor tensor = device_.allocate(static_cast<std::int64_t>(nbytes), at::kByte, Owner::kOptimizerStates);
    device_.fill_zero(tensor.data_ptr(), nbytes);
    return tensor;
  }

  Device& device_;
  StateShape shape_;
  std::function<at::Tensor(int)> param_bucket_;
  std::vector<std::optional<Slot>> buckets_;
};

}  // namespace

Lease::~Lease() {
  if (store_ != nullptr) {
    store_->release(chunk_, access_, std::move(reader_));
    store_->leased_[static_cast<std::size_t>(chunk_.bucket)][static_cast<std::size_t>(chunk_.chunk)] = false;
  }
}

StateStore::StateStore(std::vector<std::int64_t> bucket_numels, std::int64_t chunk_numel)
    : bucket_numels_(std::move(bucket_numels)), chunk_numel_(chunk_numel) {
  PANNIER_CHECK(chunk_numel > 0, fmt::format("chunks of {} elements", chunk_numel));
  for (int b = 0; b < num_buckets(); ++b) {
    leased_.emplace_back(static_cast<std::size_t>(num_chunks(b)), false);
  }
}

int StateStore::num_chunks(int bucket) const {
  const std::int64_t numel = bucket_numels_.at(static_cast<std::size_t>(bucket));
  return static_cast<int>(numel / chunk_numel_ + (numel % chunk_numel_ > 0 ? 1 : 0));
}

ElementRange StateStore::range(ChunkId chunk) const {
  PANNIER_CHECK(
      0 <= chunk.bucket && chunk.bucket < num_buckets() && 0 <= chunk.chunk && chunk.chunk < num_chunks(chunk.bucket),
      fmt::format("chunk {} of bucket {}", chunk.chunk, chunk.bucket));
  const std::int64_t begin = chunk.chunk == 0 ? 0 : chunk.chunk * chunk_numel_;
  const std::int64_t left = bucket_numels_[static_cast<std::size_t>(chunk.bucket)] - begin;
  return {begin, begin + std::min(chunk_numel_, left)};
}

ChunkId StateStore::chunk_of(int bucket, std::int64_t element) const {
  return {bucket, static_cast<int>(element / chunk_numel_)};
}

Lease StateStore::lease(ChunkId chunk, Access access) {
  (void)range(chunk);
  auto& leased = leased_[static_cast<std::size_t>(chunk.bucket)];
  const auto index = static_cast<std::size_t>(chunk.chunk);
  PANNIER_CHECK(!leased[index], fmt::format("chunk {} of bucket {} is leased already", chunk.chunk, chunk.bucket));
  // Who reads what is about to be updated does not check it.
  StateView view = acquire(chunk, access == Access::kTiles && before_update_ ? Access::kUpdate : access);
  if (access != Access::kRead && before_update_) {
    before_update_(chunk, view);
  }
  leased[index] = true;
  return {*this, chunk, access, view};
}

std::unique_ptr<StateStore> make_device_store(Device& device, const StateShape& shape,
                                              std::vector<std::int64_t> bucket_numels,
                                              std::function<at::Tensor(int)> param_bucket) {
  return std::make_unique<DeviceStore>(device, shape, std::move(bucket_numels), std::move(param_bucket));
}

HostStateStore::HostStateStore(HostMemory& memory, const StateShape& shape,
                               const std::vector<std::int64_t>& bucket_numels, const std::vector<std::byte*>& params)
    : StateStore(bucket_numels) {
  const auto layout_of = [&](std::size_t bucket) {
    StateShape own = shape;
    own.param_nbytes = params.empty() || params[bucket] == nullptr ? shape.param_nbytes : 0;
    return host_bucket_layout(own, bucket_numels[bucket]);
  };
  std::size_t nbytes = 0;
  for (std::size_t b = 0; b < bucket_numels.size(); ++b) {
    nbytes += layout_of(b).nbytes;
  }
  slab_ = HostSlab(memory, nbytes, {.owner = "optimizer states"}, torch_parallel_for());
  std::byte* bucket = slab_.data().data();
  for (std::size_t b = 0; b < bucket_numels.size(); ++b) {
    const HostBucketLayout layout = layout_of(b);
    std::byte* const elsewhere = params.empty() ? nullptr : params[b];
    views_.push_back(view_of(shape, layout, {0, bucket_numels[b]}, bucket,
                             elsewhere == nullptr ? bucket + layout.offsets[3] : elsewhere));
    bucket += layout.nbytes;
  }
}

StateView HostStateStore::acquire(ChunkId chunk, Access /*access*/) {
  if (recall_) {
    recall_(chunk.bucket);
  }
  return view(chunk.bucket);
}

StateView view_of(const StateShape& shape, const HostBucketLayout& layout, ElementRange range, std::byte* states,
                  void* param) {
  return {.range = range,
          .param = param,
          .rest = shape.rest_nbytes == 0 ? nullptr : states + layout.offsets[2],
          .state1 = shape.num_states < 1 ? nullptr : reinterpret_cast<float*>(states + layout.offsets[0]),
          .state2 = shape.num_states < 2 ? nullptr : reinterpret_cast<float*>(states + layout.offsets[1])};
}

}  // namespace pannier
