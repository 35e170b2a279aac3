// reference.h as kernels, in a file of its own so that the compiler cannot move an operation across FloatModes.
#include "pannier/kernels/cpu/kernels.h"
#include "pannier/kernels/reference.h"

namespace pannier::kernels::cpu {
namespace {

template <Algorithm kAlgorithm, StateFormat kFormat>
void plain_update(const UpdateCoefficients& coefficients, const UpdateBuffers& buffers) {
  reference::update(kAlgorithm, kFormat, coefficients, buffers);
}

template <Algorithm kAlgorithm>
UpdateKernel find_for_algorithm(StateFormat format) {
  switch (format) {
    case StateFormat::kFp32:
      return &plain_update<kAlgorithm, StateFormat::kFp32>;
    case StateFormat::kFp16:
      return &plain_update<kAlgorithm, StateFormat::kFp16>;
    case StateFormat::kBf16:
      return &plain_update<kAlgorithm, StateFormat::kBf16>;
  }
  return nullptr;
}

template <GradType kType>
double plain_block_sum(const void* grad, std::int64_t numel) {
  return reference::block_sum(grad, kType, numel);
}

template <GradType kType, bool kFirst>
void plain_accumulate(float* sum, const void* grad, std::int64_t numel) {
  reference::accumulate(sum, grad, kType, numel, kFirst);
}

void plain_split(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto parts = reference::split(master[i]);
    hi[i] = parts.hi;
    lo[i] = parts.lo;
  }
}

void plain_join(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    master[i] = reference::join(hi[i], lo[i]);
  }
}

void plain_to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    to[i] = reference::to_fp16(from[i]);
  }
}

}  // namespace

UpdateKernel find_plain_update_kernel(const UpdateVariant& variant) {
  switch (variant.algorithm) {
    case Algorithm::kAdamW:
      return find_for_algorithm<Algorithm::kAdamW>(variant.format);
    case Algorithm::kAdam:
      return find_for_algorithm<Algorithm::kAdam>(variant.format);
    case Algorithm::kSgd:
      return find_for_algorithm<Algorithm::kSgd>(variant.format);
    case Algorithm::kAdagrad:
      return find_for_algorithm<Algorithm::kAdagrad>(variant.format);
    case Algorithm::kLion:
      return find_for_algorithm<Algorithm::kLion>(variant.format);
  }
  return nullptr;
}

BlockSumKernel find_plain_block_sum_kernel(GradType type) {
  switch (type) {
    case GradType::kFp32:
      return &plain_block_sum<GradType::kFp32>;
    case GradType::kFp16:
      return &plain_block_sum<GradType::kFp16>;
    case GradType::kBf16:
      return &plain_block_sum<GradType::kBf16>;
  }
  return nullptr;
}

AccumulateKernel find_plain_accumulate_kernel(GradType type, bool first) {
  switch (type) {
    case GradType::kFp32:
      return first ? &plain_accumulate<GradType::kFp32, true> : &plain_accumulate<GradType::kFp32, false>;
    case GradType::kFp16:
      return first ? &plain_accumulate<GradType::kFp16, true> : &plain_accumulate<GradType::kFp16, false>;
    case GradType::kBf16:
      return first ? &plain_accumulate<GradType::kBf16, true> : &plain_accumulate<GradType::kBf16, false>;
  }
  return nullptr;
}

ConvertKernels find_plain_convert_kernels() { return {&plain_split, &plain_join, &plain_to_fp16}; }

}  // namespace pannier::kernels::cpu
