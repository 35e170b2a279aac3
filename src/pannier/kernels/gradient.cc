#include "pannier/kernels/gradient.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "pannier/kernels/cpu/float_modes.h"
#include "pannier/kernels/cpu/kernels.h"
#include "pannier/kernels/reference_gradient.h"

namespace pannier::kernels {
namespace {

constexpr std::int64_t kGrainBlocks = 16;  // The smallest range worth a thread: 64 Ki elements.

const void* advance(const void* grad, GradType type, std::int64_t count) {
  return static_cast<const char*>(grad) + static_cast<std::size_t>(count) * (type == GradType::kFp32 ? 4 : 2);
}

std::int64_t count_nonfinite(const void* grad, GradType type, std::int64_t numel) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    count += std::isfinite(reference::load_gradient(grad, type, i)) ? 0 : 1;
  }
  return count;
}

}  // namespace

GradientStats gradient_stats(const void* grad, GradType type, std::int64_t numel, const ParallelFor& parallel,
                             const std::string& target) {
  const auto block_sum = cpu::find_block_sum_kernel(cpu::resolve_target(target), type);
  GradientStats total;
  std::mutex total_mutex;
  const std::int64_t num_blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  parallel(num_blocks, kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    GradientStats part;
    for (std::int64_t block = begin; block < end; ++block) {
      const void* from = advance(grad, type, block * kBlockNumel);
      const std::int64_t count = std::min(kBlockNumel, numel - block * kBlockNumel);
      const double sum = block_sum(from, count);
      if (std::isfinite(sum)) {
        part.sum_of_squares.add(sum);
      } else {  // Squares of finite fp32 numbers cannot overflow fp64, so some element is not finite.
        part.num_nonfinite += count_nonfinite(from, type, count);
      }
    }
    const std::lock_guard lock(total_mutex);
    total.sum_of_squares.add(part.sum_of_squares);
    total.num_nonfinite += part.num_nonfinite;
  });
  total.sum_of_squares.carry();
  return total;
}

void accumulate(float* sum, const void* grad, GradType type, std::int64_t numel, bool first,
                const ParallelFor& parallel, const std::string& target) {
  const auto kernel = cpu::find_accumulate_kernel(cpu::resolve_target(target), type, first);
  parallel(numel, kGrainBlocks * kBlockNumel, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    kernel(sum + begin, advance(grad, type, begin), end - begin);
  });
}

}  // namespace pannier::kernels
