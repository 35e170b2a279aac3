#include "pannier/binding/update_bench.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/device/compute.h"
#include "pannier/device/dtype.h"
#include "pannier/kernels/convert.h"

namespace pannier::binding {

UpdateBench::UpdateBench(const std::string& format, const at::Tensor& weights, const at::Tensor& grad)
    : format_(format == "bf16" ? kernels::StateFormat::kBf16 : kernels::StateFormat::kFp32) {
  PANNIER_CHECK(format == "bf16" || format == "fp32", "format '" + format + "' is neither fp32 nor bf16");
  PANNIER_CHECK(weights.scalar_type() == at::kFloat && weights.numel() == grad.numel(),
                "weights and gradient do not match");
  const StateShape shape = state_shape_of(format_, 2);
  const std::int64_t numel = weights.numel();
  const HostBucketLayout layout = host_bucket_layout(shape, numel);
  slab_ = HostSlab(memory_, layout.nbytes + grad.nbytes(), {.owner = "bench"}, torch_parallel_for());
  std::byte* base = slab_.data().data();
  buffers_ = {.param = base + layout.offsets[3],
              .rest = shape.rest_nbytes == 0 ? nullptr : base + layout.offsets[2],
              .state1 = reinterpret_cast<float*>(base + layout.offsets[0]),
              .state2 = reinterpret_cast<float*>(base + layout.offsets[1]),
              .grad = base + layout.nbytes,
              .grad_type = grad_type_of(grad.scalar_type()),
              .numel = numel};
  std::memcpy(base + layout.nbytes, grad.data_ptr(), grad.nbytes());
  if (format_ == kernels::StateFormat::kFp32) {
    std::memcpy(buffers_.param, weights.data_ptr(), weights.nbytes());
  } else {
    kernels::split_master(weights.data_ptr<float>(), static_cast<std::uint16_t*>(buffers_.param),
                          static_cast<std::int16_t*>(buffers_.rest), numel, torch_parallel_for());
  }
}

void UpdateBench::step(double lr, double beta1, double beta2, double eps, double weight_decay, double factor) {
  const kernels::Hyperparameters hyper{
      .lr = lr, .beta1 = beta1, .beta2 = beta2, .eps = eps, .weight_decay = weight_decay};
  const auto coefficients =
      kernels::make_coefficients(kernels::Algorithm::kAdamW, hyper, ++step_, static_cast<float>(factor));
  CpuCompute().update(kernels::Algorithm::kAdamW, format_, {{coefficients, buffers_}}, {});
}

at::Tensor UpdateBench::weights() const {
  at::Tensor result = at::empty({buffers_.numel}, at::kFloat);
  if (format_ == kernels::StateFormat::kFp32) {
    std::memcpy(result.data_ptr(), buffers_.param, result.nbytes());
  } else {
    kernels::join_master(static_cast<const std::uint16_t*>(buffers_.param),
                         static_cast<const std::int16_t*>(buffers_.rest), result.data_ptr<float>(), buffers_.numel,
                         torch_parallel_for());
  }
  return result;
}

std::vector<at::Tensor> UpdateBench::arrays() const {
  PANNIER_CHECK(format_ == kernels::StateFormat::kFp32, "only fp32 buffers can be lent to a peer");
  const auto view = [this](const void* data) {
    return at::from_blob(const_cast<void*>(data), {buffers_.numel}, at::TensorOptions().dtype(at::kFloat));
  };
  return {view(buffers_.param), view(buffers_.state1), view(buffers_.state2), view(buffers_.grad)};
}

}  // namespace pannier::binding
