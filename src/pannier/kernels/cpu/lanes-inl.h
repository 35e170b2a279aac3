// Vectors of fp32 lanes in and out of every stored format. Included once per Highway target, hence the toggled guard.
#if defined(PANNIER_KERNELS_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PANNIER_KERNELS_CPU_LANES_INL_H_
#undef PANNIER_KERNELS_CPU_LANES_INL_H_
#else
#define PANNIER_KERNELS_CPU_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using I16 = hn::Rebind<std::int16_t, F32>;
using F16 = hn::Rebind<hwy::float16_t, F32>;
using Vec = hn::Vec<F32>;

inline constexpr std::size_t kLanes = HWY_MAX_BYTES / sizeof(float);

/// Gives every NaN the same bits.
HWY_INLINE Vec canonical(Vec x) {
  return hn::IfThenElse(hn::IsNaN(x), hn::BitCast(F32(), hn::Set(U32(), 0x7FC00000U)), x);
}

/// Gradient types: `Lane` is what memory holds.
struct Fp32Lanes {
  using Lane = float;
  static HWY_INLINE Vec load(const float* from) { return hn::LoadU(F32(), from); }
};
struct Bf16Lanes {
  using Lane = std::uint16_t;
  static HWY_INLINE Vec load(const std::uint16_t* from) {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
  }
};
struct Fp16Lanes {
  using Lane = std::uint16_t;
  static HWY_INLINE Vec load(const std::uint16_t* from) {
    return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::LoadU(U16(), from)));
  }
};

/// Rounds canonical lanes to fp16 to nearest even.
HWY_INLINE void store_fp16(Vec x, std::uint16_t* to) {
  hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(F16(), x)), U16(), to);
}

HWY_INLINE Vec load_split(const std::uint16_t* hi, const std::int16_t* lo) {
  const auto high = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), hi)));
  const auto rest = hn::BitCast(U32(), hn::PromoteTo(I32(), hn::LoadU(I16(), lo)));
  const auto joined = hn::BitCast(F32(), hn::Add(high, rest));
  return hn::IfThenElse(hn::IsNaN(joined), hn::BitCast(F32(), high), joined);
}

HWY_INLINE void store_split(Vec canonical_master, std::uint16_t* hi, std::int16_t* lo) {
  const auto bits = hn::BitCast(U32(), canonical_master);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(U32(), 0x8000U)));
  hn::StoreU(hn::TruncateTo(U16(), high), U16(), hi);
  hn::StoreU(hn::BitCast(I16(), hn::TruncateTo(U16(), bits)), I16(), lo);
}

/// One vector's worth of memory for a tail: the rest is zero, and nothing past the end of a buffer is touched.
template <class Lane>
struct TailLanes {
  HWY_ALIGN Lane lanes[kLanes] = {};

  void fill(const Lane* from, std::size_t count) { std::memcpy(lanes, from, count * sizeof(Lane)); }
  void spill(Lane* to, std::size_t count) const { std::memcpy(to, lanes, count * sizeof(Lane)); }
};

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA
#endif  // Toggled guard.
