// Sums of squares by block, and accumulation in fp32: reference_gradient.h says the maths.
#include <array>

#include "pannier/kernels/cpu/kernels.h"
#include "pannier/kernels/reference_gradient.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/gradient_passes.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/lanes-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

using F64 = hn::ScalableTag<double>;
using HalfF32 = hn::Rebind<float, F64>;
using VecF64 = hn::Vec<F64>;

inline constexpr std::size_t kSumLanes = 32;  // Of the fixed tree, whatever the vector's width.

/// The 32 running sums of a block in as many vectors as they take.
struct LaneSums {
  static constexpr std::size_t kWidth = HWY_MAX_BYTES / sizeof(double);
  static constexpr std::size_t kNumVectors = kSumLanes / kWidth;

  VecF64 vectors[kNumVectors];

  HWY_INLINE LaneSums() {
    for (auto& vector : vectors) {
      vector = hn::Zero(F64());
    }
  }

  template <class Grad>
  HWY_INLINE void add(const typename Grad::Lane* grad) {
    for (std::size_t i = 0; i < kNumVectors; i += 2) {
      const Vec x = Grad::load(grad + i * kWidth);
      const VecF64 low = hn::PromoteTo(F64(), hn::LowerHalf(HalfF32(), x));
      const VecF64 high = hn::PromoteTo(F64(), hn::UpperHalf(HalfF32(), x));
      vectors[i] = hn::MulAdd(low, low, vectors[i]);
      vectors[i + 1] = hn::MulAdd(high, high, vectors[i + 1]);
    }
  }

  HWY_INLINE double combine() const {
    HWY_ALIGN std::array<double, kSumLanes> lanes;
    for (std::size_t i = 0; i < kNumVectors; ++i) {
      hn::StoreU(vectors[i], F64(), lanes.data() + i * kWidth);
    }
    return reference::combine_lanes(lanes);
  }
};

template <class Grad>
double block_sum(const void* grad, std::int64_t numel) {
  using Lane = typename Grad::Lane;
  const auto* from = static_cast<const Lane*>(grad);
  const auto count = static_cast<std::size_t>(numel);
  LaneSums sums;
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    sums.add<Grad>(from + i);
  }
  if (i < count) {  // Adding the square of a padding zero changes no lane.
    Lane tail[kSumLanes] = {};
    std::memcpy(tail, from + i, (count - i) * sizeof(Lane));
    sums.add<Grad>(tail);
  }
  return sums.combine();
}

template <class Grad, bool kFirst>
void accumulate(float* sum, const void* grad, std::int64_t numel) {
  const auto* from = static_cast<const typename Grad::Lane*>(grad);
  const auto count = static_cast<std::size_t>(numel);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec g = Grad::load(from + i);
    hn::StoreU(canonical(kFirst ? g : hn::Add(hn::LoadU(F32(), sum + i), g)), F32(), sum + i);
  }
  if (i < count) {
    TailLanes<typename Grad::Lane> tail;
    TailLanes<float> tail_sum;
    tail.fill(from + i, count - i);
    tail_sum.fill(sum + i, count - i);
    const Vec g = Grad::load(tail.lanes);
    hn::StoreU(canonical(kFirst ? g : hn::Add(hn::LoadU(F32(), tail_sum.lanes), g)), F32(), tail_sum.lanes);
    tail_sum.spill(sum + i, count - i);
  }
}

cpu::BlockSumKernel find_block_sum(GradType type) {
  return type == GradType::kFp32   ? &block_sum<Fp32Lanes>
         : type == GradType::kFp16 ? &block_sum<Fp16Lanes>
                                   : &block_sum<Bf16Lanes>;
}

cpu::AccumulateKernel find_accumulate(GradType type, bool first) {
  switch (type) {
    case GradType::kFp32:
      return first ? &accumulate<Fp32Lanes, true> : &accumulate<Fp32Lanes, false>;
    case GradType::kFp16:
      return first ? &accumulate<Fp16Lanes, true> : &accumulate<Fp16Lanes, false>;
    case GradType::kBf16:
      return first ? &accumulate<Bf16Lanes, true> : &accumulate<Bf16Lanes, false>;
  }
  return nullptr;
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

BlockSumKernel find_block_sum_kernel(Target target, GradType type) {
  static constexpr TargetTable<BlockSumKernel (*)(GradType)> table =
      PANNIER_TARGET_TABLE(find_block_sum, &find_plain_block_sum_kernel);
  return at_target(table, target)(type);
}

AccumulateKernel find_accumulate_kernel(Target target, GradType type, bool first) {
  static constexpr TargetTable<AccumulateKernel (*)(GradType, bool)> table =
      PANNIER_TARGET_TABLE(find_accumulate, &find_plain_accumulate_kernel);
  return at_target(table, target)(type, first);
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
