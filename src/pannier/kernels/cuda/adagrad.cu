#include "pannier/kernels/cuda/update-inl.h"

namespace pannier::kernels::cuda {
namespace {

struct AdagradRule {
  static constexpr int kNumStates = 1;
  static __device__ __forceinline__ void apply(const UpdateCoefficients& c, float g, float& w, float& sum,
                                               float& /*state2*/) {
    g = __fmaf_rn(c.weight_decay, w, g);
    sum = __fmaf_rn(g, g, sum);
    w = __fmaf_rn(c.neg_step_size, __fdiv_rn(g, __fadd_rn(__fsqrt_rn(sum), c.eps)), w);
  }
};

}  // namespace

void detail::launch_adagrad(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream) {
  launch_rule<AdagradRule>(batch, arguments, stream);
}

}  // namespace pannier::kernels::cuda
