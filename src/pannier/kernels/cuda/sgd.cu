#include "pannier/kernels/cuda/update-inl.h"

namespace pannier::kernels::cuda {
namespace {

template <bool kHasMomentum>
struct SgdRule {
  static constexpr int kNumStates = kHasMomentum ? 1 : 0;
  static __device__ __forceinline__ void apply(const UpdateCoefficients& c, float g, float& w, float& buffer,
                                               float& /*state2*/) {
    g = __fmaf_rn(c.weight_decay, w, g);
    float direction = g;
    if constexpr (kHasMomentum) {
      buffer = __fmaf_rn(c.beta1, buffer, __fmul_rn(c.one_minus_beta1, g));
      direction = c.nesterov ? __fmaf_rn(c.beta1, buffer, g) : buffer;
    }
    w = __fmaf_rn(c.neg_step_size, direction, w);
  }
};

}  // namespace

void detail::launch_sgd(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream) {
  if (batch.has_state1) {
    launch_rule<SgdRule<true>>(batch, arguments, stream);
  } else {
    launch_rule<SgdRule<false>>(batch, arguments, stream);
  }
}

}  // namespace pannier::kernels::cuda
