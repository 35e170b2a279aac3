// SGD, plain, with momentum, and with Nesterov momentum: reference.h says the maths.
#include "pannier/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/sgd.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/update-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum>
class SgdRule {
 public:
  static constexpr int kNumStates = kMomentum == Momentum::kNone ? 0 : 1;

  explicit HWY_INLINE SgdRule(const UpdateCoefficients& c)
      : weight_decay_(hn::Set(F32(), c.weight_decay)),
        momentum_(hn::Set(F32(), c.beta1)),
        one_minus_dampening_(hn::Set(F32(), c.one_minus_beta1)),
        neg_lr_(hn::Set(F32(), c.neg_step_size)) {}

  HWY_INLINE void apply(Vec g, Vec& w, Vec& buffer, Vec& /*state2*/) const {
    g = hn::MulAdd(weight_decay_, w, g);
    Vec direction = g;
    if constexpr (kMomentum != Momentum::kNone) {
      buffer = hn::MulAdd(momentum_, buffer, hn::Mul(one_minus_dampening_, g));
      direction = kMomentum == Momentum::kNesterov ? hn::MulAdd(momentum_, buffer, g) : buffer;
    }
    w = hn::MulAdd(neg_lr_, direction, w);
  }

 private:
  Vec weight_decay_, momentum_, one_minus_dampening_, neg_lr_;
};

cpu::UpdateKernel find_sgd(const cpu::UpdateVariant& variant) {
  if (!variant.has_momentum) {
    return find_rule<SgdRule<Momentum::kNone>>(variant.format, variant.grad_type);
  }
  return variant.nesterov ? find_rule<SgdRule<Momentum::kNesterov>>(variant.format, variant.grad_type)
                          : find_rule<SgdRule<Momentum::kPlain>>(variant.format, variant.grad_type);
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

UpdateKernel find_sgd_kernel(Target target, const UpdateVariant& variant) {
  static constexpr TargetTable<FindUpdateKernel> table = PANNIER_TARGET_TABLE(find_sgd, &find_plain_update_kernel);
  return at_target(table, target)(variant);
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
