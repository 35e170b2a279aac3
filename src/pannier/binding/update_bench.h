// The update kernel alone, for `./dev bench update`: buffers in host memory, the engine's own arithmetic, torch's
// threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pannier/kernels/update.h"
#include "pannier/mem/host_slab.h"

namespace pannier::binding {

/// Holds one bucket's state as the host tier does, and a gradient.
class UpdateBench : public torch::CustomClassHolder {
 public:
  /// `format` is "fp32" or "bf16"; `weights` are fp32, `grad` has the format's type; both are flat and of one size.
  UpdateBench(const std::string& format, const at::Tensor& weights, const at::Tensor& grad);
  /// One AdamW update with the gradient multiplied by `factor`.
  void step(double lr, double beta1, double beta2, double eps, double weight_decay, double factor);
  /// The fp32 master weights.
  [[nodiscard]] at::Tensor weights() const;
  /// The arrays themselves (fp32 only): weights, exp_avg, exp_avg_sq and gradient, valid while this lives. A peer that
  /// works on them has the same pages, and where pages lie can decide more than the kernel.
  [[nodiscard]] std::vector<at::Tensor> arrays() const;

 private:
  HostMemory memory_;
  HostSlab slab_;
  kernels::StateFormat format_;
  kernels::UpdateBuffers buffers_;
  std::int64_t step_ = 0;
};

}  // namespace pannier::binding
