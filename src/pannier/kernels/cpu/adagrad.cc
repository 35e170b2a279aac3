// Adagrad: reference.h says the maths.
#include "pannier/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/adagrad.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/update-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

class AdagradRule {
 public:
  static constexpr int kNumStates = 1;

  explicit HWY_INLINE AdagradRule(const UpdateCoefficients& c)
      : weight_decay_(hn::Set(F32(), c.weight_decay)),
        neg_step_size_(hn::Set(F32(), c.neg_step_size)),
        eps_(hn::Set(F32(), c.eps)) {}

  HWY_INLINE void apply(Vec g, Vec& w, Vec& sum, Vec& /*state2*/) const {
    g = hn::MulAdd(weight_decay_, w, g);
    sum = hn::MulAdd(g, g, sum);
    w = hn::MulAdd(neg_step_size_, hn::Div(g, hn::Add(hn::Sqrt(sum), eps_)), w);
  }

 private:
  Vec weight_decay_, neg_step_size_, eps_;
};

cpu::UpdateKernel find_adagrad(const cpu::UpdateVariant& variant) {
  return find_rule<AdagradRule>(variant.format, variant.grad_type);
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

UpdateKernel find_adagrad_kernel(Target target, const UpdateVariant& variant) {
  static constexpr TargetTable<FindUpdateKernel> table = PANNIER_TARGET_TABLE(find_adagrad, &find_plain_update_kernel);
  return at_target(table, target)(variant);
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
