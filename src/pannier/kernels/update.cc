#include "pannier/kernels/update.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/kernels/cpu/float_modes.h"
#include "pannier/kernels/cpu/kernels.h"
#include "pannier/kernels/gradient.h"

namespace pannier::kernels {
namespace {

// The smallest range worth a thread: 32 Ki elements, about a megabyte of states.
constexpr std::int64_t kGrainBlocks = 8;

std::size_t param_nbytes(StateFormat format) { return format == StateFormat::kFp32 ? 4 : 2; }
std::size_t rest_nbytes(StateFormat format) { return format == StateFormat::kFp16 ? 4 : 2; }
std::size_t grad_nbytes(GradType type) { return type == GradType::kFp32 ? 4 : 2; }

void* advance(void* pointer, std::int64_t count, std::size_t element_nbytes) {
  return static_cast<char*>(pointer) + static_cast<std::size_t>(count) * element_nbytes;
}

void check_buffers(Algorithm algorithm, StateFormat format, const UpdateBuffers& b) {
  PANNIER_CHECK(b.numel >= 0, fmt::format("a run of {} elements", b.numel));
  if (b.numel == 0) {
    return;
  }
  const bool needs_state1 = algorithm != Algorithm::kSgd;
  const bool needs_state2 = algorithm == Algorithm::kAdamW || algorithm == Algorithm::kAdam;
  PANNIER_CHECK(b.param != nullptr && b.grad != nullptr, "an update needs a parameter and a gradient");
  PANNIER_CHECK(b.rest != nullptr || format == StateFormat::kFp32, "a 16-bit parameter needs the rest of its master");
  PANNIER_CHECK((b.state1 != nullptr || !needs_state1) && (b.state2 != nullptr || !needs_state2),
                fmt::format("algorithm {} lacks a state buffer", static_cast<int>(algorithm)));
}

cpu::UpdateKernel find_kernel(cpu::Target target, const cpu::UpdateVariant& variant) {
  switch (variant.algorithm) {
    case Algorithm::kAdamW:
    case Algorithm::kAdam:
      return cpu::find_adam_kernel(target, variant);
    case Algorithm::kSgd:
      return cpu::find_sgd_kernel(target, variant);
    case Algorithm::kAdagrad:
      return cpu::find_adagrad_kernel(target, variant);
    case Algorithm::kLion:
      return cpu::find_lion_kernel(target, variant);
  }
  return nullptr;
}

cpu::UpdateKernel checked_kernel(Algorithm algorithm, StateFormat format, const UpdateCoefficients& coefficients,
                                 const UpdateBuffers& buffers, cpu::Target target) {
  check_buffers(algorithm, format, buffers);
  const GradType type = buffers.grad_type;
  PANNIER_CHECK(!(format == StateFormat::kBf16 && type == GradType::kFp16), "a bf16 parameter has no fp16 gradient");
  PANNIER_CHECK(!(format == StateFormat::kFp16 && type == GradType::kBf16), "an fp16 parameter has no bf16 gradient");
  const auto kernel = find_kernel(target, {algorithm, format, type, buffers.state1 != nullptr, coefficients.nesterov});
  PANNIER_CHECK(kernel != nullptr, fmt::format("no kernel for algorithm {}", static_cast<int>(algorithm)));
  return kernel;
}

std::int64_t num_blocks(std::int64_t numel) { return (numel + kBlockNumel - 1) / kBlockNumel; }

// Where each task's blocks begin in the flat list of all tasks' blocks, and in the end their number.
std::vector<std::int64_t> first_blocks(const std::vector<UpdateTask>& tasks) {
  std::vector<std::int64_t> firsts{0};
  firsts.reserve(tasks.size() + 1);
  for (const auto& task : tasks) {
    firsts.push_back(firsts.back() + num_blocks(task.buffers.numel));
  }
  return firsts;
}

}  // namespace

UpdateBuffers slice(StateFormat format, const UpdateBuffers& buffers, std::int64_t begin, std::int64_t numel) {
  PANNIER_CHECK(begin >= 0 && numel >= 0 && begin + numel <= buffers.numel,
                fmt::format("a slice [{}, {} + {}) of {} elements", begin, begin, numel, buffers.numel));
  UpdateBuffers part = buffers;
  part.numel = numel;
  part.param = advance(buffers.param, begin, param_nbytes(format));
  part.grad = static_cast<const char*>(buffers.grad) + static_cast<std::size_t>(begin) * grad_nbytes(buffers.grad_type);
  part.rest = buffers.rest != nullptr ? advance(buffers.rest, begin, rest_nbytes(format)) : nullptr;
  part.state1 = buffers.state1 != nullptr ? buffers.state1 + begin : nullptr;
  part.state2 = buffers.state2 != nullptr ? buffers.state2 + begin : nullptr;
  return part;
}

void update(Algorithm algorithm, StateFormat format, const UpdateCoefficients& coefficients,
            const UpdateBuffers& buffers, const std::string& target) {
  const auto kernel = checked_kernel(algorithm, format, coefficients, buffers, cpu::resolve_target(target));
  const cpu::FloatModes modes;
  kernel(coefficients, buffers);
}

void update_all(Algorithm algorithm, StateFormat format, const std::vector<UpdateTask>& tasks,
                const ParallelFor& parallel, const std::string& target) {
  const cpu::Target resolved = cpu::resolve_target(target);
  std::vector<cpu::UpdateKernel> kernels;  // Found before the first write, so that a bad task leaves all as before.
  kernels.reserve(tasks.size());
  for (const auto& task : tasks) {
    kernels.push_back(checked_kernel(algorithm, format, task.coefficients, task.buffers, resolved));
  }
  const auto firsts = first_blocks(tasks);
  parallel(firsts.back(), kGrainBlocks, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    auto index = static_cast<std::size_t>(std::upper_bound(firsts.begin(), firsts.end(), begin) - firsts.begin() - 1);
    for (; index < tasks.size() && firsts[index] < end; ++index) {
      const auto& task = tasks[index];
      const std::int64_t from = std::max<std::int64_t>(begin - firsts[index], 0) * kBlockNumel;
      const std::int64_t to = std::min((end - firsts[index]) * kBlockNumel, task.buffers.numel);
      if (from < to) {
        kernels[index](task.coefficients, slice(format, task.buffers, from, to - from));
      }
    }
  });
}

}  // namespace pannier::kernels
