// The stored formats in bulk: reference_bits.h says the bits.
#include "pannier/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pannier/kernels/cpu/conversions.cc"
#include "pannier/kernels/cpu/foreach_fma_target.h"
#include "pannier/kernels/cpu/lanes-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

void split(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) {
  const auto count = static_cast<std::size_t>(numel);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store_split(canonical(hn::LoadU(F32(), master + i)), hi + i, lo + i);
  }
  if (i < count) {
    TailLanes<float> from;
    TailLanes<std::uint16_t> high;
    TailLanes<std::int16_t> low;
    from.fill(master + i, count - i);
    store_split(canonical(hn::LoadU(F32(), from.lanes)), high.lanes, low.lanes);
    high.spill(hi + i, count - i);
    low.spill(lo + i, count - i);
  }
}

void join(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) {
  const auto count = static_cast<std::size_t>(numel);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(canonical(load_split(hi + i, lo + i)), F32(), master + i);
  }
  if (i < count) {
    TailLanes<std::uint16_t> high;
    TailLanes<std::int16_t> low;
    TailLanes<float> to;
    high.fill(hi + i, count - i);
    low.fill(lo + i, count - i);
    hn::StoreU(canonical(load_split(high.lanes, low.lanes)), F32(), to.lanes);
    to.spill(master + i, count - i);
  }
}

void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) {
  const auto count = static_cast<std::size_t>(numel);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store_fp16(canonical(hn::LoadU(F32(), from + i)), to + i);
  }
  if (i < count) {
    TailLanes<float> tail;
    TailLanes<std::uint16_t> rounded;
    tail.fill(from + i, count - i);
    store_fp16(canonical(hn::LoadU(F32(), tail.lanes)), rounded.lanes);
    rounded.spill(to + i, count - i);
  }
}

cpu::ConvertKernels find_convert() { return {&split, &join, &to_fp16}; }

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA

#if HWY_ONCE
namespace pannier::kernels::cpu {

ConvertKernels find_convert_kernels(Target target) {
  static constexpr TargetTable<ConvertKernels (*)()> table =
      PANNIER_TARGET_TABLE(find_convert, &find_plain_convert_kernels);
  return at_target(table, target)();
}

}  // namespace pannier::kernels::cpu
#endif  // HWY_ONCE
