// The stored 16-bit formats, bit by bit: bf16 and fp16 to fp32, fp32 to fp16 rounded to nearest even, and the lossless
// split of an fp32 master in a bf16 `hi` and a signed 16-bit `lo`. All in unsigned arithmetic, so nothing here depends
// on the processor's floating-point modes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace pannier::kernels::reference {

/// The one NaN that is ever stored. As bf16 it is 0x7FC0, as fp16 0x7E00.
inline constexpr std::uint32_t kCanonicalNan = 0x7FC00000U;

/// Gives every NaN the same bits.
inline float canonical(float x) { return std::isnan(x) ? std::bit_cast<float>(kCanonicalNan) : x; }

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

inline float from_fp16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = bits & 0x3FFU;
  if (exponent == 0) {  // Zero and denormals are multiples of 2^-24, all of them normal in fp32.
    const auto magnitude = std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * 0x1p-24F);
    return std::bit_cast<float>(sign | magnitude);
  }
  if (exponent == 31) {
    return std::bit_cast<float>(mantissa != 0 ? kCanonicalNan : sign | 0x7F800000U);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

/// Rounds to nearest even; above 65519.996 to infinity; NaN to 0x7E00.
inline std::uint16_t to_fp16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return 0x7E00U;
  }
  std::uint32_t rounded = 0;
  if (magnitude >= 0x477FF000U) {
    rounded = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {
    rounded = (magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  } else if (magnitude >= 0x33000000U) {  // From half of the least denormal on: count units of 2^-24.
    const std::uint32_t shift = 126U - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
    const std::uint32_t left_over = mantissa & ((1U << shift) - 1U);
    const std::uint32_t half = 1U << (shift - 1U);
    rounded = mantissa >> shift;
    rounded += (left_over > half || (left_over == half && (rounded & 1U) != 0)) ? 1U : 0U;
  }
  return static_cast<std::uint16_t>(sign | rounded);
}

/// An fp32 number as the bf16 parameter that the model sees and the rest that makes it whole.
struct SplitMaster {
  std::uint16_t hi;
  std::int16_t lo;
};

/// Rounds half away from zero to `hi`. The rest, bits - (hi << 16), is always the low half of `bits`, read as signed.
inline SplitMaster split(float master) {
  const auto bits = std::bit_cast<std::uint32_t>(canonical(master));
  return {static_cast<std::uint16_t>((bits + 0x8000U) >> 16), static_cast<std::int16_t>(bits & 0xFFFFU)};
}

/// Undoes split. A `lo` left over from before `hi` was edited never makes a NaN: it is taken as 0 there.
inline float join(std::uint16_t hi, std::int16_t lo) {
  const std::uint32_t high = static_cast<std::uint32_t>(hi) << 16;
  const auto joined = std::bit_cast<float>(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(lo)));
  return canonical(std::isnan(joined) ? std::bit_cast<float>(high) : joined);
}

}  // namespace pannier::kernels::reference
