// AdamW and Adam: reference.h says the maths.
#include "pannier/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/adam.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/update-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

template <bool kDecoupled>
class AdamRule {
 public:
  static constexpr int kNumStates = 2;

  explicit HWY_INLINE AdamRule(const UpdateCoefficients& c)
      : decay_(hn::Set(F32(), kDecoupled ? c.neg_lr_decay : c.weight_decay)),
        beta1_(hn::Set(F32(), c.beta1)),
        one_minus_beta1_(hn::Set(F32(), c.one_minus_beta1)),
        beta2_(hn::Set(F32(), c.beta2)),
        one_minus_beta2_(hn::Set(F32(), c.one_minus_beta2)),
        neg_step_size_(hn::Set(F32(), c.neg_step_size)),
        inv_sqrt_bias2_(hn::Set(F32(), c.inv_sqrt_bias2)),
        eps_(hn::Set(F32(), c.eps)) {}

  HWY_INLINE void apply(Vec g, Vec& w, Vec& m, Vec& v) const {
    if constexpr (kDecoupled) {
      w = hn::MulAdd(decay_, w, w);
    } else {
      g = hn::MulAdd(decay_, w, g);
    }
    m = hn::MulAdd(beta1_, m, hn::Mul(one_minus_beta1_, g));
    v = hn::MulAdd(beta2_, v, hn::Mul(hn::Mul(one_minus_beta2_, g), g));
    const Vec denominator = hn::MulAdd(hn::Sqrt(v), inv_sqrt_bias2_, eps_);
    w = hn::MulAdd(neg_step_size_, hn::Div(m, denominator), w);
  }

 private:
  Vec decay_, beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, neg_step_size_, inv_sqrt_bias2_, eps_;
};

cpu::UpdateKernel find_adam(const cpu::UpdateVariant& variant) {
  return variant.algorithm == Algorithm::kAdamW ? find_rule<AdamRule<true>>(variant.format, variant.grad_type)
                                                : find_rule<AdamRule<false>>(variant.format, variant.grad_type);
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

UpdateKernel find_adam_kernel(Target target, const UpdateVariant& variant) {
  static constexpr TargetTable<FindUpdateKernel> table = PANNIER_TARGET_TABLE(find_adam, &find_plain_update_kernel);
  return at_target(table, target)(variant);
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
