#include "pannier/tier/gradient_store.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "pannier/base/units.h"

namespace pannier {
namespace {

at::ScalarType scalar_type_of(kernels::GradType type) {
  return type == kernels::GradType::kFp32 ? at::kFloat : type == kernels::GradType::kFp16 ? at::kHalf : at::kBFloat16;
}

std::size_t nbytes_of_type(kernels::GradType type) { return type == kernels::GradType::kFp32 ? 4 : 2; }

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

  void flush(int /*bucket*/) override {}
  [[nodiscard]] GradientView view(int parameter) override {
    const at::Tensor& held = held_.at(static_cast<std::size_t>(parameter));
    if (!held.defined()) {
      return {};
    }
    return {held.data_ptr(), held.scalar_type() == at::kFloat ? kernels::GradType::kFp32 : options_.type};
  }
  [[nodiscard]] bool is_on_device(int /*parameter*/) const override { return true; }

  void write(int parameter, const at::Tensor& flat) override {
    const c10::NoGradGuard no_grad;
    held_.at(static_cast<std::size_t>(parameter)).copy_(flat);
  }
  [[nodiscard]] at::Tensor read(int parameter) override {
    const c10::NoGradGuard no_grad;
    return held_.at(static_cast<std::size_t>(parameter)).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  }

  void drop(int parameter) override { held_.at(static_cast<std::size_t>(parameter)) = at::Tensor(); }
  void free_sent(bool /*wait*/) override {}

 private:
  void accumulate(const at::Tensor& sum, const at::Tensor& gradient, bool first) {
    device_.compute().accumulate(sum.data_ptr<float>(), gradient.data_ptr(), options_.type, gradient.numel(), first);
  }

  Device& device_;
  GradientStoreOptions options_;
  std::vector<at::Tensor> held_;
};

class RoutedGradients final : public GradientStore {
 public:
  RoutedGradients(GradientStore& device, GradientStore& host, const BucketLayout& layout,
                  std::function<bool(int)> goes_to_host)
      : device_(device), host_(host), layout_(layout), goes_to_host_(std::move(goes_to_host)) {}

  void add(int parameter, at::Tensor gradient, bool last) override {
    at(parameter).add(parameter, std::move(gradient), last);
  }
  void flush(int bucket) override { (goes_to_host_(bucket) ? host_ : device_).flush(bucket); }
  [[nodiscard]] GradientView view(int parameter) override { return at(parameter).view(parameter); }
  [[nodiscard]] bool is_on_device(int parameter) const override { return at(parameter).is_on_device(parameter); }
  void write(int parameter, const at::Tensor& flat) override { at(parameter).write(parameter, flat); }
  [[nodiscard]] at::Tensor read(int parameter) override { return at(parameter).read(parameter); }
  void drop(int parameter) override { at(parameter).drop(parameter); }
  void free_sent(bool wait) override { host_.free_sent(wait); }

 private:
  [[nodiscard]] GradientStore& at(int parameter) const {
    return goes_to_host_(layout_.bucket_of(parameter)) ? host_ : device_;
  }

  GradientStore& device_;
  GradientStore& host_;
  const BucketLayout& layout_;
  std::function<bool(int)> goes_to_host_;
};

}  // namespace

HostGradients::HostGradients(Device& device, HostMemory& memory, const ShardLayout& shards,
                             GradientStoreOptions options, Mover& down)
    : device_(device),
      memory_(memory),
      shards_(shards),
      options_(options),
      down_(down),
      held_(static_cast<std::size_t>(shards.buckets().num_parameters()), Held::kNothing),
      offsets_(held_.size()),
      numels_(held_.size()),
      ways_(static_cast<std::size_t>(shards.buckets().num_buckets())) {
  width_ = options_.accumulates && !options_.sum_in_own_type ? 4 : nbytes_of_type(options_.type);
  slab_ = make_slab(shards.numel(), width_);
  std::int64_t begin = 0;
  for (int b = 0; b < shards.buckets().num_buckets(); ++b) {
    for (const ShardPiece& piece : shards.pieces(b)) {
      offsets_[static_cast<std::size_t>(piece.parameter)] = begin + piece.shard_offset;
      numels_[static_cast<std::size_t>(piece.parameter)] = piece.numel;
    }
    begin += shards.shard(b).numel();
  }
}

HostGradients::~HostGradients() {
  for (const Way& way : ways_) {
    if (way.transfer) {
      way.transfer->wait_ended();
    }
  }
}

HostSlab HostGradients::make_slab(std::int64_t numel, std::size_t width) {
  return {memory_, nbytes_of(numel, width), {.owner = "gradients"}, torch_parallel_for()};
}

at::Tensor HostGradients::own_type_tensor(std::size_t i) {
  return at::from_blob(own_type(i), {numels_[i]}, at::TensorOptions().dtype(scalar_type_of(options_.type)));
}

// A second micro-batch that nobody announced gets a slab for fp32 sums, which then stays for the windows to come.
float* HostGradients::fp32_sum(std::size_t i) {
  if (width_ != 4 && sums_.nbytes() == 0) {
    sums_ = make_slab(shards_.numel(), 4);
  }
  HostSlab& slab = width_ == 4 ? slab_ : sums_;
  return reinterpret_cast<float*>(slab.data().data()) + offsets_[i];
}

void HostGradients::widen(std::size_t i) {
  // Own type and sum may share their address: widen from a copy, so that no element is read after it was overwritten.
  const at::Tensor copy = own_type_tensor(i).clone();
  compute_.accumulate(fp32_sum(i), copy.data_ptr(), options_.type, numels_[i], true);
}

void HostGradients::add(int parameter, at::Tensor gradient, bool last) {
  const auto i = static_cast<std::size_t>(parameter);
  const int bucket = shards_.buckets().bucket_of(parameter);
  const bool own_type_is_enough = options_.sum_in_own_type || options_.type == kernels::GradType::kFp32;
  if (held_.at(i) == Held::kNothing && (last || own_type_is_enough)) {
    Way& way = ways_[static_cast<std::size_t>(bucket)];
    if (way.transfer) {
      arrive(bucket);
    }
    way.runs.push_back({own_type(i), gradient.data_ptr(), gradient.nbytes()});
    way.sources.push_back(std::move(gradient));
    held_[i] = options_.type == kernels::GradType::kFp32 ? Held::kFp32Sum : Held::kOwnType;
    return;
  }
  arrive(bucket);
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

void HostGradients::flush(int bucket) {
  Way& way = ways_.at(static_cast<std::size_t>(bucket));
  if (!way.runs.empty()) {
    way.transfer =
        down_.push(std::exchange(way.runs, {}), {device_.record(Queue::kCompute)}, nullptr, "gradients", bucket);
  }
}

void HostGradients::arrive(int bucket) {
  flush(bucket);
  Way& way = ways_[static_cast<std::size_t>(bucket)];
  if (way.transfer) {
    way.transfer->wait_done();
    way = {};
  }
}

void HostGradients::free_sent(bool wait) {
  for (Way& way : ways_) {
    if (way.transfer && wait) {
      way.transfer->wait_done();
    }
    if (way.transfer && way.transfer->is_done()) {
      way = {};
    }
  }
}

GradientView HostGradients::view(int parameter) {
  const auto i = static_cast<std::size_t>(parameter);
  if (held_.at(i) == Held::kNothing) {
    return {};
  }
  arrive(shards_.buckets().bucket_of(parameter));
  return held_[i] == Held::kOwnType ? GradientView{own_type(i), options_.type}
                                    : GradientView{fp32_sum(i), kernels::GradType::kFp32};
}

void HostGradients::write(int parameter, const at::Tensor& flat) {
  device_.copy_to_host(view(parameter).data, flat.data_ptr(), flat.nbytes());
}

at::Tensor HostGradients::read(int parameter) {
  const GradientView held = view(parameter);
  const at::Tensor own =
      device_.allocate(numels_[static_cast<std::size_t>(parameter)], scalar_type_of(held.type), Owner::kActivations);
  device_.copy_to_device(own.data_ptr(), held.data, own.nbytes());
  return own.to(at::kFloat);
}

void HostGradients::drop(int parameter) {
  // What is on its way may arrive: nobody will look at it, and what comes later to the same place comes after it.
  held_.at(static_cast<std::size_t>(parameter)) = Held::kNothing;
  Way& way = ways_[static_cast<std::size_t>(shards_.buckets().bucket_of(parameter))];
  if (!way.transfer) {
    way = {};
  }
}

std::unique_ptr<GradientStore> make_device_gradients(Device& device, int num_parameters, GradientStoreOptions options) {
  return std::make_unique<DeviceGradients>(device, num_parameters, options);
}

std::unique_ptr<GradientStore> make_routed_gradients(GradientStore& device, GradientStore& host,
                                                     const BucketLayout& layout,
                                                     std::function<bool(int)> goes_to_host) {
  return std::make_unique<RoutedGradients>(device, host, layout, std::move(goes_to_host));
}

}  // namespace pannier
