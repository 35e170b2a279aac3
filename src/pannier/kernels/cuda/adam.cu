#include "pannier/kernels/cuda/update-inl.h"

namespace pannier::kernels::cuda {
namespace {

// The common end of AdamW and Adam: moments, then the step from `weight`.
__device__ __forceinline__ float adam_step(const UpdateCoefficients& c, float g, float weight, float& exp_avg,
                                           float& exp_avg_sq) {
  exp_avg = __fmaf_rn(c.beta1, exp_avg, __fmul_rn(c.one_minus_beta1, g));
  exp_avg_sq = __fmaf_rn(c.beta2, exp_avg_sq, __fmul_rn(__fmul_rn(c.one_minus_beta2, g), g));
  const float denominator = __fmaf_rn(__fsqrt_rn(exp_avg_sq), c.inv_sqrt_bias2, c.eps);
  return __fmaf_rn(c.neg_step_size, __fdiv_rn(exp_avg, denominator), weight);
}

struct AdamWRule {
  static constexpr int kNumStates = 2;
  static __device__ __forceinline__ void apply(const UpdateCoefficients& c, float g, float& w, float& exp_avg,
                                               float& exp_avg_sq) {
    w = adam_step(c, g, __fmaf_rn(c.neg_lr_decay, w, w), exp_avg, exp_avg_sq);
  }
};

struct AdamRule {
  static constexpr int kNumStates = 2;
  static __device__ __forceinline__ void apply(const UpdateCoefficients& c, float g, float& w, float& exp_avg,
                                               float& exp_avg_sq) {
    w = adam_step(c, __fmaf_rn(c.weight_decay, w, g), w, exp_avg, exp_avg_sq);
  }
};

}  // namespace

void detail::launch_adamw(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream) {
  launch_rule<AdamWRule>(batch, arguments, stream);
}

void detail::launch_adam(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream) {
  launch_rule<AdamRule>(batch, arguments, stream);
}

}  // namespace pannier::kernels::cuda
