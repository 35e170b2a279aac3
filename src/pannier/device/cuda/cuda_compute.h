// The kernels on a GPU, in the order of the caller's stream.
#pragma once

#include "pannier/device/compute.h"
#include "pannier/device/cuda/cuda_support.h"

namespace pannier {

/// Runs kernels/cuda on one GPU. One caller at a time.
class CudaCompute final : public Compute {
 public:
  explicit CudaCompute(c10::DeviceIndex device) : device_(device), area_(device) {}

  void update(kernels::Algorithm algorithm, kernels::StateFormat format, const std::vector<kernels::UpdateTask>& tasks,
              const kernels::UpdateControl& control) override;
  void accumulate(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) override;
  void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) override;
  void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) override;
  void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) override;

 private:
  c10::DeviceIndex device_;
  UploadArea area_;
};

}  // namespace pannier
