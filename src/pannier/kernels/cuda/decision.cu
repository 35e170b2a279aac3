#include "pannier/kernels/cuda/cuda_error.h"
#include "pannier/kernels/cuda/decision.h"

namespace pannier::kernels::cuda {
namespace {

constexpr int kNumLimbs = ExactSum::kNumLimbs;

// The sum rounded to the nearest fp64, ties to even: ExactSum::value.
__device__ double round_sum(const std::int64_t* sum) {
  unsigned long long limbs[kNumLimbs + 1];  // Of 32 bits each; the top limb of the sum may hold more.
  unsigned long long carry = 0;
  int highest = 0;
  for (int i = 0; i <= kNumLimbs; ++i) {
    carry += i < kNumLimbs ? static_cast<unsigned long long>(sum[i]) : 0;
    limbs[i] = carry & 0xFFFFFFFFULL;
    carry >>= 32;
    highest = limbs[i] != 0 ? i : highest;
  }
  if (limbs[highest] == 0) {
    return 0;
  }
  const unsigned long long second = highest >= 1 ? limbs[highest - 1] : 0;
  const unsigned long long third = highest >= 2 ? limbs[highest - 2] : 0;
  const unsigned long long top = (limbs[highest] << 32) | second;
  const int shift = __clzll(static_cast<long long>(top));  // 0 to 31.
  const unsigned long long window = (top << shift) | (third >> (32 - shift));
  bool sticky = ((third << shift) & 0xFFFFFFFFULL) != 0 || (window & 0x3FFU) != 0;
  for (int i = 0; i < highest - 2; ++i) {
    sticky = sticky || limbs[i] != 0;
  }
  unsigned long long mantissa = window >> 11;
  if ((window & 0x400U) != 0 && (sticky || (mantissa & 1U) != 0)) {
    ++mantissa;
  }
  return scalbn(__ull2double_rn(mantissa), 32 * (highest - 1) - shift + 11 - 340);
}

__global__ void decide_kernel(const DeviceGradientStats* stats, DecisionInputs inputs, Decision* decision) {
  const double sum = round_sum(stats->limbs);
  const bool has_nonfinite = stats->num_nonfinite > 0;
  const double infinity = __longlong_as_double(0x7FF0000000000000LL);
  const double norm = has_nonfinite ? infinity : __ddiv_rn(__dsqrt_rn(sum), inputs.scale);
  const bool skip = has_nonfinite && inputs.skips_nonfinite;
  const double guarded = __dadd_rn(norm, 1e-6);
  const bool clips = !skip && inputs.clip > 0 && isfinite(norm) && guarded > inputs.clip;
  const double coefficient = clips ? __ddiv_rn(inputs.clip, guarded) : 1.0;
  decision->sum_of_squares = sum;
  decision->norm = norm;
  decision->num_nonfinite = stats->num_nonfinite;
  decision->grad_factor = __double2float_rn(__ddiv_rn(coefficient, inputs.scale));
  decision->skip = skip ? 1 : 0;
}

}  // namespace

void decide(const DeviceGradientStats* stats, const DecisionInputs& inputs, Decision* decision, Stream stream) {
  decide_kernel<<<1, 1, 0, stream>>>(stats, inputs, decision);
  check_launch("decide the step");
}

}  // namespace pannier::kernels::cuda
