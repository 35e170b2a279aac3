#include "pannier/tier/gradient_store.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <numeric>
#include <utility>

#include "pannier/base/units.h"

namespace pannier {
namespace {

at::ScalarType scalar_type_of(kernels::GradType type) {
  return type == kernels::GradType::kFp32 ? at::kFloat : type == kernels::GradType::kFp16 ? at::kHalf : at::kBFloat16;
}

std::size_t nbytes_of_type(kernels::GradType type) { return type == kernels::GradType::kFp32 ? 4 : 2; }

/// What a bucket of the window holds.
enum class Held : std::uint8_t { kNothing, kOwnType, kFp32Sum };

class DeviceGradients final : public GradientStore {
 public:
  DeviceGradients(Device& device, int num_buckets, GradientStoreOptions options)
      : device_(device), options_(options), held_(static_cast<std::size_t>(num_buckets)) {}

  void add(int bucket, at::Tensor gradient, bool last) override {
    const c10::NoGradGuard no_grad;
    at::Tensor& held = held_.at(static_cast<std::size_t>(bucket));
    const bool own_type_is_enough = options_.sum_in_own_type || options_.type == kernels::GradType::kFp32;
    if (!held.defined() && (last || own_type_is_enough)) {
      held = std::move(gradient);
      return;
    }
    if (own_type_is_enough) {
      add_in_own_type(held, gradient);
      return;
    }
    if (!held.defined() || held.scalar_type() != at::kFloat) {
      const at::Tensor before = std::exchange(held, device_.allocate(gradient.numel(), at::kFloat, Owner::kGradients));
      if (before.defined()) {
        accumulate(held, before, true);
      }
      accumulate(held, gradient, !before.defined());
      return;
    }
    accumulate(held, gradient, false);
  }

  [[nodiscard]] GradientView view(int bucket) const override {
    const at::Tensor& held = held_.at(static_cast<std::size_t>(bucket));
    if (!held.defined()) {
      return {};
    }
    return {held.data_ptr(), held.scalar_type() == at::kFloat ? kernels::GradType::kFp32 : options_.type};
  }

  void drop(int bucket) override { held_.at(static_cast<std::size_t>(bucket)) = at::Tensor(); }
  [[nodiscard]] Compute& compute() override { return device_.compute(); }

 private:
  void accumulate(const at::Tensor& sum, const at::Tensor& gradient, bool first) {
    device_.compute().accumulate(sum.data_ptr<float>(), gradient.data_ptr(), options_.type, gradient.numel(), first);
  }
  void add_in_own_type(const at::Tensor& sum, const at::Tensor& gradient) {
    if (options_.type == kernels::GradType::kFp32) {
      accumulate(sum, gradient, false);
    } else {
      sum.add_(gradient);
    }
  }

  Device& device_;
  GradientStoreOptions options_;
  std::vector<at::Tensor> held_;
};

class HostGradients final : public GradientStore {
 public:
  HostGradients(Device& device, HostMemory& memory, const std::vector<std::int64_t>& bucket_numels,
                GradientStoreOptions options)
      : device_(device),
        memory_(memory),
        options_(options),
        numels_(bucket_numels),
        held_(bucket_numels.size(), Held::kNothing),
        addresses_(bucket_numels.size()),
        sums_(bucket_numels.size()) {
    const auto numel = std::accumulate(numels_.begin(), numels_.end(), std::int64_t{0});
    const bool wide = options_.accumulates && !options_.sum_in_own_type;
    width_ = wide ? 4 : nbytes_of_type(options_.type);
    slab_ = HostSlab(memory, nbytes_of(numel, width_), {.owner = "gradients"}, torch_parallel_for());
    std::byte* next = slab_.data().data();
    for (std::size_t i = 0; i < numels_.size(); ++i) {
      addresses_[i] = std::exchange(next, next + nbytes_of(numels_[i], width_));
    }
  }

  void add(int bucket, at::Tensor gradient, bool last) override {
    const auto i = static_cast<std::size_t>(bucket);
    const bool own_type_is_enough = options_.sum_in_own_type || options_.type == kernels::GradType::kFp32;
    if (held_.at(i) == Held::kNothing && (last || own_type_is_enough)) {
      device_.copy_to_host(addresses_[i], gradient.data_ptr(), gradient.nbytes());
      held_[i] = options_.type == kernels::GradType::kFp32 ? Held::kFp32Sum : Held::kOwnType;
      return;
    }
    if (options_.sum_in_own_type && options_.type != kernels::GradType::kFp32) {
      add_in_own_type(i, gradient);
      return;
    }
    float* sum = fp32_sum(i);
    const bool first = held_[i] == Held::kNothing;
    if (held_[i] == Held::kOwnType) {
      widen(i, sum);
    }
    device_.add_to_host(sum, gradient.data_ptr(), options_.type, gradient.numel(), first);
    held_[i] = Held::kFp32Sum;
  }

  [[nodiscard]] GradientView view(int bucket) const override {
    const auto i = static_cast<std::size_t>(bucket);
    switch (held_.at(i)) {
      case Held::kNothing:
        return {};
      case Held::kOwnType:
        return {addresses_[i], options_.type};
      case Held::kFp32Sum:
        break;
    }
    return {width_ == 4 ? addresses_[i] : const_cast<HostSlab&>(sums_[i]).data().data(), kernels::GradType::kFp32};
  }

  void drop(int bucket) override { held_.at(static_cast<std::size_t>(bucket)) = Held::kNothing; }
  [[nodiscard]] Compute& compute() override { return compute_; }

 private:
  // A second micro-batch that nobody announced gets a slab of its own, which then stays for the windows to come.
  float* fp32_sum(std::size_t i) {
    if (width_ == 4) {
      return reinterpret_cast<float*>(addresses_[i]);
    }
    if (sums_[i].nbytes() == 0) {
      sums_[i] = HostSlab(memory_, nbytes_of(numels_[i], 4), {.owner = "gradients"}, torch_parallel_for());
    }
    return reinterpret_cast<float*>(sums_[i].data().data());
  }

  void widen(std::size_t i, float* sum) {
    if (width_ == 4) {
      // Own type and sum share the address: widen through a copy, so that no element is read after it was overwritten.
      const HostSlab copy = [&] {
        HostSlab made(memory_, nbytes_of(numels_[i], 2), {.owner = "gradients"}, torch_parallel_for());
        std::copy_n(addresses_[i], nbytes_of(numels_[i], 2), made.data().data());
        return made;
      }();
      compute_.accumulate(sum, copy.data().data(), options_.type, numels_[i], true);
      return;
    }
    compute_.accumulate(sum, addresses_[i], options_.type, numels_[i], true);
  }

  void add_in_own_type(std::size_t i, const at::Tensor& gradient) {
    const c10::NoGradGuard no_grad;
    at::from_blob(addresses_[i], {numels_[i]}, at::TensorOptions().dtype(scalar_type_of(options_.type)))
        .add_(gradient.to(at::kCPU));
    held_[i] = Held::kOwnType;
  }

  Device& device_;
  HostMemory& memory_;
  GradientStoreOptions options_;
  std::vector<std::int64_t> numels_;
  std::vector<Held> held_;
  std::size_t width_ = 4;
  HostSlab slab_;
  std::vector<std::byte*> addresses_;
  std::vector<HostSlab> sums_;
  CpuCompute compute_;
};

}  // namespace

std::unique_ptr<GradientStore> make_device_gradients(Device& device, int num_buckets, GradientStoreOptions options) {
  return std::make_unique<DeviceGradients>(device, num_buckets, options);
}

std::unique_ptr<GradientStore> make_host_gradients(Device& device, HostMemory& memory,
                                                   const std::vector<std::int64_t>& bucket_numels,
                                                   GradientStoreOptions options) {
  return std::make_unique<HostGradients>(device, memory, bucket_numels, options);
}

}  // namespace pannier
