#include "pannier/tier/fingerprint.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <c10/core/GradMode.h>

#include <algorithm>

namespace pannier {
namespace {

constexpr std::int64_t kChunk = 16384;
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15;

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// Odd numbers without a pattern: what a word adds depends on where it is.
at::Tensor weights(const at::Device& device) {
  std::vector<std::int64_t> numbers(kChunk);
  std::uint64_t state = 0;
  for (std::int64_t& number : numbers) {
    number = static_cast<std::int64_t>(mixed(state += kStep) | 1);
  }
  return at::tensor(numbers, at::kLong).to(device);
}

at::Tensor words_of(const at::Tensor& flat) {
  const bool is_wide = flat.element_size() % 4 == 0;
  return flat.detach().view(is_wide ? at::kInt : flat.element_size() == 2 ? at::kShort : at::kByte);
}

// Sums of 64 bits wrap around, so their order does not matter.
at::Tensor fingerprint(const at::Tensor& words, const at::Tensor& factors) {
  at::Tensor sum = at::zeros({}, factors.options());
  std::uint64_t state = kStep;
  for (std::int64_t begin = 0; begin < words.numel(); begin += kChunk) {
    const at::Tensor chunk = words.narrow(0, begin, std::min(kChunk, words.numel() - begin)).to(at::kLong);
    chunk.add_(chunk.bitwise_right_shift(16));  // Round numbers end in zeros, and products would too.
    const auto factor = static_cast<std::int64_t>(mixed(state += kStep) | 1);
    sum.add_(chunk.mul_(factors.narrow(0, 0, chunk.numel())).sum().mul_(factor));
  }
  return sum;
}

}  // namespace

std::vector<std::int64_t> fingerprints(const std::vector<at::Tensor>& flat) {
  const c10::NoGradGuard no_grad;
  std::vector<std::int64_t> result(flat.size());
  if (flat.empty()) {
    return result;
  }
  const at::Tensor factors = weights(flat.front().device());
  std::vector<at::Tensor> sums;
  sums.reserve(flat.size());
  for (const at::Tensor& tensor : flat) {
    sums.push_back(fingerprint(words_of(tensor), factors));
  }
  const at::Tensor all = at::stack(sums).cpu();
  std::copy_n(all.const_data_ptr<std::int64_t>(), result.size(), result.begin());
  return result;
}

}  // namespace pannier
