#include "pannier/kernels/cuda/update-inl.h"

namespace pannier::kernels::cuda {
namespace {

struct LionRule {
  static constexpr int kNumStates = 1;
  static __device__ __forceinline__ void apply(const UpdateCoefficients& c, float g, float& w, float& exp_avg,
                                               float& /*state2*/) {
    const float interpolated = __fmaf_rn(c.beta1, exp_avg, __fmul_rn(c.one_minus_beta1, g));
    float sign = interpolated;  // Keeps NaN and zero.
    if (interpolated > 0 || interpolated < 0) {
      sign = interpolated > 0 ? 1.0F : -1.0F;
    }
    w = __fmaf_rn(c.neg_step_size, sign, __fmaf_rn(c.neg_lr_decay, w, w));
    exp_avg = __fmaf_rn(c.beta2, exp_avg, __fmul_rn(c.one_minus_beta2, g));
  }
};

}  // namespace

void detail::launch_lion(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream) {
  launch_rule<LionRule>(batch, arguments, stream);
}

}  // namespace pannier::kernels::cuda
