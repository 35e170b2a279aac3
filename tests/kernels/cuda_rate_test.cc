// How fast the CUDA kernels move memory, beside a copy on the same device. Prints; judges nothing but that they ran.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <random>

#include "pannier/kernels/cuda/decision.h"
#include "pannier/kernels/cuda/gradient.h"
#include "pannier/kernels/cuda/update.h"
#include "pannier/layout/bucket_layout.h"
#include "tests/kernels/cuda_arena.h"

namespace pannier::testing {
namespace {

namespace cuda = kernels::cuda;
using kernels::Algorithm;
using kernels::GradType;
using kernels::StateFormat;

class CudaRates : public CudaTest {};

constexpr int kRepeats = 21;
constexpr std::int64_t kPatternNumel = std::int64_t{1} << 22;

double median_seconds(const std::function<void()>& work) {
  cudaEvent_t begin{};
  cudaEvent_t end{};
  require_cuda(cudaEventCreate(&begin));
  require_cuda(cudaEventCreate(&end));
  std::vector<double> seconds;
  for (int i = -3; i < kRepeats; ++i) {
    require_cuda(cudaEventRecord(begin));
    work();
    require_cuda(cudaEventRecord(end));
    require_cuda(cudaEventSynchronize(end));
    float milliseconds = 0;
    require_cuda(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= 0) {
      seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
    }
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

void report(const char* what, double nbytes, double seconds) {
  fmt::print("{:<58} {:9.3f} ms {:8.0f} GB/s\n", what, seconds * 1e3, nbytes / seconds * 1e-9);
}

// Device memory filled with a repeated pattern.
template <class T>
void fill(const DeviceArray<T>& array, std::int64_t numel, const std::vector<T>& pattern) {
  const auto step = static_cast<std::int64_t>(pattern.size());
  for (std::int64_t i = 0; i < numel; i += step) {
    const auto count = static_cast<std::size_t>(std::min(step, numel - i));
    require_cuda(cudaMemcpy(array.data() + i, pattern.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
}

// The buffers of a bf16 parameter with AdamW, filled with numbers of a training's sizes.
struct Model {
  explicit Model(std::int64_t numel)
      : hi(static_cast<std::size_t>(numel)),
        lo(static_cast<std::size_t>(numel)),
        grad(static_cast<std::size_t>(numel)),
        exp_avg(static_cast<std::size_t>(numel)),
        exp_avg_sq(static_cast<std::size_t>(numel)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> weights(kPatternNumel);
    std::vector<std::int16_t> rests(kPatternNumel);
    std::vector<std::uint16_t> grads(kPatternNumel);
    std::vector<float> averages(kPatternNumel);
    std::vector<float> squares(kPatternNumel);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
      rests[i] = static_cast<std::int16_t>(random());
      grads[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(1e-3F * normal(random)) >> 16);
      averages[i] = 1e-3F * normal(random);
      squares[i] = 1e-6F * std::abs(normal(random));
    }
    fill(hi, numel, weights);
    fill(lo, numel, rests);
    fill(grad, numel, grads);
    fill(exp_avg, numel, averages);
    fill(exp_avg_sq, numel, squares);
  }

  // The first `numel` elements, cut in runs of `run_numel`.
  [[nodiscard]] std::vector<kernels::UpdateTask> tasks(std::int64_t numel, std::int64_t run_numel) const {
    kernels::Hyperparameters hyper;
    hyper.weight_decay = 0.01;
    const auto coefficients = kernels::make_coefficients(Algorithm::kAdamW, hyper, 10, 1.0F);
    std::vector<kernels::UpdateTask> all;
    for (std::int64_t i = 0; i < numel; i += run_numel) {
      all.push_back({coefficients,
                     {hi.data() + i, lo.data() + i, exp_avg.data() + i, exp_avg_sq.data() + i, grad.data() + i,
                      GradType::kBf16, std::min(run_numel, numel - i)}});
    }
    return all;
  }

  DeviceArray<std::uint16_t> hi;
  DeviceArray<std::int16_t> lo;
  DeviceArray<std::uint16_t> grad;
  DeviceArray<float> exp_avg, exp_avg_sq;
};

void report_update(const char* what, const Model& model, std::int64_t numel, std::int64_t run_numel) {
  const auto batch = cuda::make_update_batch(Algorithm::kAdamW, StateFormat::kBf16, model.tasks(numel, run_numel));
  const DeviceArray<cuda::UpdateRun> runs(batch.runs);
  const DeviceArray<float> factor(std::vector<float>{0.5F});
  report(what, 26.0 * static_cast<double>(numel),
         median_seconds([&] { cuda::update(batch, runs.data(), {factor.data(), nullptr}, nullptr); }));
}

void report_stats(const char* what, const void* grad, GradType type, std::int64_t numel, std::int64_t run_numel) {
  const std::int64_t element_nbytes = type == GradType::kFp32 ? 4 : 2;
  std::vector<cuda::GradientRun> runs;
  for (std::int64_t i = 0; i < numel; i += run_numel) {
    runs.push_back({static_cast<const char*>(grad) + i * element_nbytes, std::min(run_numel, numel - i), 0});
  }
  const std::int64_t num_blocks = cuda::number_blocks(runs);
  const DeviceArray<cuda::GradientRun> device_runs(runs);
  const DeviceArray<cuda::DeviceGradientStats> stats(std::vector<cuda::DeviceGradientStats>(1));
  report(what, static_cast<double>(element_nbytes * numel), median_seconds([&] {
           cuda::gradient_stats(device_runs.data(), static_cast<int>(runs.size()), num_blocks, type, stats.data(),
                                nullptr, nullptr);
         }));
}

TEST_F(CudaRates, ArePrinted) {
  constexpr std::int64_t kBucket = std::int64_t{16} << 20;
  std::int64_t numel = std::int64_t{256} << 20;
  std::size_t free_nbytes = 0;
  std::size_t total_nbytes = 0;
  require_cuda(cudaMemGetInfo(&free_nbytes, &total_nbytes));
  while (static_cast<std::size_t>(numel) * 15 > free_nbytes) {
    numel /= 2;
  }
  cudaDeviceProp device{};
  require_cuda(cudaGetDeviceProperties(&device, 0));
  fmt::print("{}, {} Mi parameters\n", device.name, numel >> 20);
  const Model model(numel);
  const auto count = static_cast<double>(numel);
  report("copy, 8 bytes an element (cudaMemcpy)", 8 * count, median_seconds([&] {
           require_cuda(cudaMemcpyAsync(model.exp_avg_sq.data(), model.exp_avg.data(),
                                        static_cast<std::size_t>(numel) * 4, cudaMemcpyDeviceToDevice));
         }));
  fill(model.exp_avg_sq, numel, std::vector<float>(kPatternNumel, 1e-6F));
  report_update("AdamW bf16, one run", model, numel, numel);
  report_update("AdamW bf16, runs of 1 Mi", model, numel, std::int64_t{1} << 20);
  report_update("AdamW bf16, a bucket of 16 Mi in 256 runs", model, kBucket, kBucket / 256);
  report_stats("norm of bf16, one run", model.grad.data(), GradType::kBf16, numel, numel);
  report_stats("norm of bf16, a bucket of 16 Mi in 256 runs", model.grad.data(), GradType::kBf16, kBucket,
               kBucket / 256);
  report_stats("norm of fp32, one run", model.exp_avg.data(), GradType::kFp32, numel, numel);
  report("accumulate bf16 in fp32, 10 bytes an element", 10 * count, median_seconds([&] {
           cuda::accumulate(model.exp_avg.data(), model.grad.data(), GradType::kBf16, numel, false, nullptr);
         }));
  const DeviceArray<cuda::DeviceGradientStats> stats(std::vector<cuda::DeviceGradientStats>(1));
  const DeviceArray<kernels::Decision> decision(1);
  report("decision", 0, median_seconds([&] { cuda::decide(stats.data(), {}, decision.data(), nullptr); }));
}

}  // namespace
}  // namespace pannier::testing
