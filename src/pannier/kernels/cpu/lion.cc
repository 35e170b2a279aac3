// Lion: reference.h says the maths.
#include "pannier/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/lion.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/update-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

class LionRule {
 public:
  static constexpr int kNumStates = 1;

  explicit HWY_INLINE LionRule(const UpdateCoefficients& c)
      : neg_lr_decay_(hn::Set(F32(), c.neg_lr_decay)),
        beta1_(hn::Set(F32(), c.beta1)),
        one_minus_beta1_(hn::Set(F32(), c.one_minus_beta1)),
        beta2_(hn::Set(F32(), c.beta2)),
        one_minus_beta2_(hn::Set(F32(), c.one_minus_beta2)),
        neg_lr_(hn::Set(F32(), c.neg_step_size)) {}

  HWY_INLINE void apply(Vec g, Vec& w, Vec& m, Vec& /*state2*/) const {
    const Vec interpolated = hn::MulAdd(beta1_, m, hn::Mul(one_minus_beta1_, g));
    const auto is_nonzero = hn::Gt(hn::Abs(interpolated), hn::Zero(F32()));  // False for NaN, which is kept as zero is.
    const Vec sign = hn::IfThenElse(is_nonzero, hn::CopySign(hn::Set(F32(), 1.0F), interpolated), interpolated);
    w = hn::MulAdd(neg_lr_, sign, hn::MulAdd(neg_lr_decay_, w, w));
    m = hn::MulAdd(beta2_, m, hn::Mul(one_minus_beta2_, g));
  }

 private:
  Vec neg_lr_decay_, beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, neg_lr_;
};

cpu::UpdateKernel find_lion(const cpu::UpdateVariant& variant) {
  return find_rule<LionRule>(variant.format, variant.grad_type);
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

UpdateKernel find_lion_kernel(Target target, const UpdateVariant& variant) {
  static constexpr TargetTable<FindUpdateKernel> table = PANNIER_TARGET_TABLE(find_lion, &find_plain_update_kernel);
  return at_target(table, target)(variant);
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
