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
  DeviceStore(Device& device, const StateShape& shape, int num_buckets, std::function<at::Tensor(int)> param_bucket)
      : device_(device),
        shape_(shape),
        param_bucket_(std::move(param_bucket)),
        buckets_(static_cast<std::size_t>(num_buckets)) {}

  [[nodiscard]] Home home() const noexcept override { return Home::kDevice; }

 protected:
  [[nodiscard]] StateView acquire(int bucket) override {
    auto& slot = buckets_.at(static_cast<std::size_t>(bucket));
    const at::Tensor param = param_bucket_(bucket);
    if (!slot) {
      slot = Slot{zeroed(nbytes_of(param.numel(), shape_.rest_nbytes)),
                  zeroed(nbytes_of(param.numel(), shape_.num_states < 1 ? 0 : 4)),
                  zeroed(nbytes_of(param.numel(), shape_.num_states < 2 ? 0 : 4))};
    }
    return {.param = param.data_ptr(),
            .rest = slot->rest.defined() ? slot->rest.data_ptr() : nullptr,
            .state1 = slot->state1.defined() ? static_cast<float*>(slot->state1.data_ptr()) : nullptr,
            .state2 = slot->state2.defined() ? static_cast<float*>(slot->state2.data_ptr()) : nullptr};
  }
  void release(int /*bucket*/) noexcept override {}

 private:
  struct Slot {
    at::Tensor rest, state1, state2;
  };

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
    store_->release(bucket_);
    store_->leased_[static_cast<std::size_t>(bucket_)] = false;
  }
}

Lease StateStore::lease(int bucket) {
  PANNIER_CHECK(bucket >= 0, fmt::format("bucket {}", bucket));
  const auto index = static_cast<std::size_t>(bucket);
  if (leased_.size() <= index) {
    leased_.resize(index + 1, false);
  }
  PANNIER_CHECK(!leased_[index], fmt::format("bucket {} is leased already", bucket));
  StateView view = acquire(bucket);
  leased_[index] = true;
  return {*this, bucket, view};
}

std::unique_ptr<StateStore> make_device_store(Device& device, const StateShape& shape, int num_buckets,
                                              std::function<at::Tensor(int)> param_bucket) {
  return std::make_unique<DeviceStore>(device, shape, num_buckets, std::move(param_bucket));
}

HostStateStore::HostStateStore(HostMemory& memory, const StateShape& shape,
                               const std::vector<std::int64_t>& bucket_numels, const std::vector<std::byte*>& params) {
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
    views_.push_back(view_of(shape, layout, bucket, elsewhere == nullptr ? bucket + layout.offsets[3] : elsewhere));
    bucket += layout.nbytes;
  }
}

StateView HostStateStore::acquire(int bucket) {
  if (recall_) {
    recall_(bucket);
  }
  return view(bucket);
}

StateView view_of(const StateShape& shape, const HostBucketLayout& layout, std::byte* states, void* param) {
  return {.param = param,
          .rest = shape.rest_nbytes == 0 ? nullptr : states + layout.offsets[2],
          .state1 = shape.num_states < 1 ? nullptr : reinterpret_cast<float*>(states + layout.offsets[0]),
          .state2 = shape.num_states < 2 ? nullptr : reinterpret_cast<float*>(states + layout.offsets[1])};
}

}  // namespace pannier
