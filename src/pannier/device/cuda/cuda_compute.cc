#include "pannier/device/cuda/cuda_compute.h"

#include <c10/cuda/CUDAGuard.h>

#include <map>

#include "pannier/kernels/cuda/convert.h"
#include "pannier/kernels/cuda/gradient.h"
#include "pannier/kernels/cuda/update.h"

namespace pannier {

namespace cuda = kernels::cuda;

void CudaCompute::update(kernels::Algorithm algorithm, kernels::StateFormat format,
                         const std::vector<kernels::UpdateTask>& tasks, const kernels::UpdateControl& control) {
  const c10::cuda::CUDAGuard guard(device_);
  // One launch takes gradients of one type; a window's sums are fp32, what came only once is in its own.
  std::map<kernels::GradType, std::vector<kernels::UpdateTask>> by_type;
  for (const auto& task : tasks) {
    by_type[task.buffers.grad_type].push_back(task);
  }
  for (const auto& [type, of_type] : by_type) {
    const auto batch = cuda::make_update_batch(algorithm, format, of_type);
    if (batch.num_blocks > 0) {
      const at::Tensor runs = area_.upload(std::span<const cuda::UpdateRun>(batch.runs));
      cuda::update(batch, static_cast<const cuda::UpdateRun*>(runs.data_ptr()), control, compute_stream(device_));
    }
  }
}

void CudaCompute::accumulate(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) {
  const c10::cuda::CUDAGuard guard(device_);
  cuda::accumulate(sum, grad, type, numel, first, compute_stream(device_));
}

void CudaCompute::split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) {
  const c10::cuda::CUDAGuard guard(device_);
  cuda::split_master(master, hi, lo, numel, compute_stream(device_));
}

void CudaCompute::join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) {
  const c10::cuda::CUDAGuard guard(device_);
  cuda::join_master(hi, lo, master, numel, compute_stream(device_));
}

void CudaCompute::to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) {
  const c10::cuda::CUDAGuard guard(device_);
  cuda::to_fp16(from, to, numel, compute_stream(device_));
}

}  // namespace pannier
