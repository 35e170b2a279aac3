#include "pannier/device/cuda/cuda_judge.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <map>
#include <vector>

#include "pannier/device/cuda/cuda_support.h"
#include "pannier/kernels/cuda/decision.h"
#include "pannier/kernels/cuda/gradient.h"

namespace pannier {
namespace {

namespace cuda = kernels::cuda;

constexpr std::int64_t kNumNumbers = sizeof(cuda::DeviceGradientStats) / sizeof(std::int64_t);

class CudaJudge final : public GradientJudge {
 public:
  explicit CudaJudge(c10::DeviceIndex device) : device_(device), area_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    numbers_ = at::zeros({kNumNumbers}, options(at::kLong));
    decision_ = at::zeros({static_cast<std::int64_t>(sizeof(kernels::Decision))}, options(at::kByte));
    counts_ = at::zeros({1024}, options(at::kLong));
    void* pinned = nullptr;
    check_cuda(cudaHostAlloc(&pinned, sizeof(kernels::Decision), cudaHostAllocPortable), "allocate the decision");
    told_ = static_cast<kernels::Decision*>(pinned);
    check_cuda(cudaEventCreateWithFlags(&decided_, cudaEventDisableTiming | cudaEventBlockingSync), "create an event");
  }
  ~CudaJudge() override {
    cudaEventSynchronize(decided_);
    cudaEventDestroy(decided_);
    cudaFreeHost(told_);
  }

  void reset() override {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::NoGradGuard no_grad;
    numbers_.zero_();
    counts_.zero_();
    parameters_.clear();
  }

  void add(const std::vector<GradientRun>& runs) override {
    const c10::cuda::CUDAGuard guard(device_);
    std::map<kernels::GradType, std::vector<GradientRun>> by_type;
    for (const GradientRun& run : runs) {
      if (run.numel > 0) {
        by_type[run.type].push_back(run);
      }
    }
    for (const auto& [type, of_type] : by_type) {
      std::vector<cuda::GradientRun> batch;
      const std::int64_t first = reserve(of_type.size());
      for (const GradientRun& run : of_type) {
        batch.push_back({run.data, run.numel, 0});
        parameters_.push_back(run.parameter);
      }
      const std::int64_t num_blocks = cuda::number_blocks(batch);
      const at::Tensor uploaded = area_.upload(std::span<const cuda::GradientRun>(batch));
      cuda::gradient_stats(static_cast<const cuda::GradientRun*>(uploaded.data_ptr()), static_cast<int>(batch.size()),
                           num_blocks, type, device_stats(), counts_.data_ptr<std::int64_t>() + first,
                           compute_stream(device_));
    }
  }

  void add_stats(const kernels::GradientStats& stats, int parameter) override {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::NoGradGuard no_grad;
    std::vector<std::int64_t> numbers(stats.sum_of_squares.limbs().begin(), stats.sum_of_squares.limbs().end());
    numbers.push_back(stats.num_nonfinite);
    const at::Tensor uploaded = area_.upload(std::span<const std::int64_t>(numbers));
    numbers_.add_(uploaded.view(at::kLong));
    const std::int64_t slot = reserve(1);
    parameters_.push_back(parameter);
    counts_.select(0, slot).add_(stats.num_nonfinite);
  }

  void exchange(const std::function<void(std::span<std::int64_t>)>& exchange) override {
    const c10::cuda::CUDAGuard guard(device_);
    const c10::NoGradGuard no_grad;
    const at::Tensor numbers = numbers_.cpu();
    exchange({numbers.data_ptr<std::int64_t>(), static_cast<std::size_t>(kNumNumbers)});
    numbers_.copy_(numbers);
  }

  void decide(const kernels::DecisionInputs& inputs) override {
    const c10::cuda::CUDAGuard guard(device_);
    const cudaStream_t stream = compute_stream(device_);
    cuda::decide(device_stats(), inputs, decision(), stream);
    check_cuda(cudaMemcpyAsync(told_, decision(), sizeof(*told_), cudaMemcpyDeviceToHost, stream), "read the decision");
    check_cuda(cudaEventRecord(decided_, stream), "mark the decision");
  }

  [[nodiscard]] kernels::UpdateControl control() const override {
    return {&decision()->grad_factor, &decision()->skip};
  }

  [[nodiscard]] Verdict verdict() override {
    check_cuda(cudaEventSynchronize(decided_), "wait for the decision");
    Verdict verdict{*told_, -1};
    if (verdict.decision.num_nonfinite > 0) {
      const at::Tensor counts = counts_.cpu();
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        int& first = verdict.first_nonfinite_parameter;
        if (counts.data_ptr<std::int64_t>()[i] > 0 && (first < 0 || parameters_[i] < first)) {
          first = parameters_[i];
        }
      }
    }
    return verdict;
  }

 private:
  [[nodiscard]] at::TensorOptions options(at::ScalarType dtype) const {
    return at::TensorOptions().dtype(dtype).device(c10::Device(c10::DeviceType::CUDA, device_));
  }
  [[nodiscard]] cuda::DeviceGradientStats* device_stats() {
    return static_cast<cuda::DeviceGradientStats*>(numbers_.data_ptr());
  }
  [[nodiscard]] kernels::Decision* decision() const { return static_cast<kernels::Decision*>(decision_.data_ptr()); }

  // Room for the counts of so many more runs; returns the first one's place.
  std::int64_t reserve(std::size_t count) {
    const auto first = static_cast<std::int64_t>(parameters_.size());
    const std::int64_t needed = first + static_cast<std::int64_t>(count);
    if (needed > counts_.numel()) {
      const c10::NoGradGuard no_grad;
      const at::Tensor larger = at::zeros({std::max(needed, 2 * counts_.numel())}, options(at::kLong));
      larger.narrow(0, 0, counts_.numel()).copy_(counts_);
      counts_ = larger;
    }
    return first;
  }

  c10::DeviceIndex device_;
  UploadArea area_;
  at::Tensor numbers_;           ///< DeviceGradientStats.
  at::Tensor decision_;          ///< Decision.
  at::Tensor counts_;            ///< Non-finite elements of each run.
  std::vector<int> parameters_;  ///< Of each run.
  kernels::Decision* told_ = nullptr;
  cudaEvent_t decided_ = nullptr;
};

}  // namespace

std::unique_ptr<GradientJudge> make_cuda_judge(c10::DeviceIndex device) { return std::make_unique<CudaJudge>(device); }

}  // namespace pannier
