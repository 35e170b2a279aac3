#include "pannier/tier/gradient_store.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "pannier/base/units.h"

namespace pannier {
namespace {

at::ScalarType scalar_type_of(kernels::GradType type) {
  return type == kernels::GradType::kFp32 ? at::kFloat : type == kernels::GradType::kFp16 ? at::kHalf : at::kBFloat16;
}

std::size_t nbytes_of_type(kernels::GradType type) { return type == kernels::GradType::kFp32 ? 4 : 2; }

/// What the window holds of a parameter.
enum class Held : std::uint8_t { kNothing, kOwnType, kFp32Sum };

class DeviceGradients final : public GradientStore {
 public:
  DeviceGradients(Device& device, int num_parameters, GradientStoreOptions options)
      : device_(device), options_(options), held_(static_cast<std::size_t>(num_parameters)) {}

  void add(int parameter, at::Tensor gradient, bool last) override {
    const c10::NoGradGuard no_grad;
    at::Tensor& held = held_.at(static_cast<std::size_t>(parameter));
    const bool own_type_is_enough = options_.sum_in_own_type || options_.type == kernels::GradType::kFp32;
    if (!held.defined() && (last || own_type_is_enough)) {
      held = std::move(gradient);
      return;
    }
    if (options_.sum_in_own_type && options_.type != kernels::GradType::kFp32) {
      held.add_(gradient);
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

  [[nodiscard]] GradientView view(int parameter) const override {
    const at::Tensor& held = held_.at(static_cast<std::size_t>(parameter));
    if (!held.defined()) {
      return {};
    }
    return {held.data_ptr(), held.scalar_type() == at::kFloat ? kernels::GradType::kFp32 : options_.type};
  }

  void drop(int parameter) override { held_.at(static_cast<std::size_t>(parameter)) = at::Tensor(); }
  [[nodiscard]] Compute& compute() override { return device_.compute(); }

 private:
  void accumulate(const at::Tensor& sum, const at::Tensor& gradient, bool first) {
    device_.compute().accumulate(sum.data_ptr<float>(), gradient.data_ptr(), options_.type, gradient.numel(), first);
  }

  Device& device_;
  GradientStoreOptions options_;
  std::vector<at::Tensor> held_;
};

class HostGradients final : public GradientStore {
 public:
  HostGradients(Device& device, HostMemory& memory, const BucketLayout& layout, GradientStoreOptions options)
      : device_(device),
        memory_(memory),
        options_(options),
        total_numel_(layout.numel()),
        held_(static_cast<std::size_t>(layout.num_parameters()), Held::kNothing),
        offsets_(held_.size()),
        numels_(held_.size()) {
    width_ = options_.accumulates && !options_.sum_in_own_type ? 4 : nbytes_of_type(options_.type);
    slab_ = make_slab(total_numel_, width_);
    std::int64_t begin = 0;
    for (const Bucket& bucket : layout.buckets()) {
      for (const Segment& segment : bucket.segments) {
        offsets_[static_cast<std::size_t>(segment.parameter)] = begin + segment.offset;
        numels_[static_cast<std::size_t>(segment.parameter)] = segment.numel;
      }
      begin += bucket.numel;
    }
  }

  void add(int parameter, at::Tensor gradient, bool last) override {
    const auto i = static_cast<std::size_t>(parameter);
    const bool own_type_is_enough = options_.sum_in_own_type || options_.type == kernels::GradType::kFp32;
    if (held_.at(i) == Held::kNothing && (last || own_type_is_enough)) {
      device_.copy_to_host(own_type(i), gradient.data_ptr(), gradient.nbytes());
      held_[i] = options_.type == kernels::GradType::kFp32 ? Held::kFp32Sum : Held::kOwnType;
      return;
    }
    if (options_.sum_in_own_type && options_.type != kernels::GradType::kFp32) {
      const c10::NoGradGuard no_grad;
      own_type_tensor(i).add_(gradient.to(at::kCPU));
      return;
    }
    const bool first = held_[i] == Held::kNothing;
    if (held_[i] == Held::kOwnType) {
      widen(i);
    }
    device_.add_to_host(fp32_sum(i), gradient.data_ptr(), options_.type, gradient.numel(), first);
    held_[i] = Held::kFp32Sum;
  }

  [[nodiscard]] GradientView view(int parameter) const override {
    const auto i = static_cast<std::size_t>(parameter);
    auto& self = const_cast<HostGradients&>(*this);
    switch (held_.at(i)) {
      case Held::kNothing:
        return {};
      case Held::kOwnType:
        return {self.own_type(i), options_.type};
      case Held::kFp32Sum:
        break;
    }
    return {self.fp32_sum(i), kernels::GradType::kFp32};
  }

  void drop(int parameter) override { held_.at(static_cast<std::size_t>(parameter)) = Held::kNothing; }
  [[nodiscard]] Compute& compute() override { return compute_; }

 private:
  [[nodiscard]] HostSlab make_slab(std::int64_t numel, std::size_t width) {
    return {memory_, nbytes_of(numel, width), {.owner = "gradients"}, torch_parallel_for()};
  }
  [[nodiscard]] void* own_type(std::size_t i) { return slab_.data().data() + nbytes_of(offsets_[i], width_); }
  [[nodiscard]] at::Tensor own_type_tensor(std::size_t i) {
    return at::from_blob(own_type(i), {numels_[i]}, at::TensorOptions().dtype(scalar_type_of(options_.type)));
  }

  // A second micro-batch that nobody announced gets a slab for fp32 sums, which then stays for the windows to come.
  [[nodiscard]] float* fp32_sum(std::size_t i) {
    if (width_ != 4 && sums_.nbytes() == 0) {
      sums_ = make_slab(total_numel_, 4);
    }
    HostSlab& slab = width_ == 4 ? slab_ : sums_;
    return reinterpret_cast<float*>(slab.data().data()) + offsets_[i];
  }

  void widen(std::size_t i) {
    // Own type and sum may share their address: widen from a copy, so that no element is read after it was overwritten.
    const at::Tensor copy = own_type_tensor(i).clone();
    compute_.accumulate(fp32_sum(i), copy.data_ptr(), options_.type, numels_[i], true);
  }

  Device& device_;
  HostMemory& memory_;
  GradientStoreOptions options_;
  std::int64_t total_numel_;
  std::vector<Held> held_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> numels_;
  std::size_t width_ = 4;
  HostSlab slab_;
  HostSlab sums_;
  CpuCompute compute_;
};

}  // namespace

std::unique_ptr<GradientStore> make_device_gradients(Device& device, int num_parameters, GradientStoreOptions options) {
  return std::make_unique<DeviceGradients>(device, num_parameters, options);
}

std::unique_ptr<GradientStore> make_host_gradients(Device& device, HostMemory& memory, const BucketLayout& layout,
                                                   GradientStoreOptions options) {
  return std::make_unique<HostGradients>(device, memory, layout, options);
}

}  // namespace pannier
