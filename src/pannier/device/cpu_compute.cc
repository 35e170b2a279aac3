#include "pannier/device/compute.h"
#include "pannier/kernels/convert.h"

namespace pannier {
namespace {

ParallelFor threads_of_update(int most) { return torch_parallel_for(most > 0 ? most : host_threads()); }

}  // namespace

void CpuCompute::update(kernels::Algorithm algorithm, kernels::StateFormat format,
                        const std::vector<kernels::UpdateTask>& tasks, const kernels::UpdateControl& control) {
  if (control.skip != nullptr && *control.skip != 0) {
    return;
  }
  if (control.grad_factor == nullptr) {
    kernels::update_all(algorithm, format, tasks, threads_of_update(most_threads_));
    return;
  }
  std::vector<kernels::UpdateTask> decided = tasks;
  for (auto& task : decided) {
    task.coefficients.grad_factor = *control.grad_factor;
  }
  kernels::update_all(algorithm, format, decided, threads_of_update(most_threads_));
}

void CpuCompute::accumulate(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) {
  kernels::accumulate(sum, grad, type, numel, first, torch_parallel_for());
}

void CpuCompute::split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) {
  kernels::split_master(master, hi, lo, numel, torch_parallel_for());
}

void CpuCompute::join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) {
  kernels::join_master(hi, lo, master, numel, torch_parallel_for());
}

void CpuCompute::to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) {
  kernels::to_fp16(from, to, numel, torch_parallel_for());
}

}  // namespace pannier
