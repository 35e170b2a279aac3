#include "pannier/kernels/exact_sum.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "pannier/base/error.h"

namespace pannier::kernels {
namespace {

constexpr int kLimbBits = 32;
constexpr int kLeastExponent = -340;  // Bit 0 of limb 0 stands for 2^-340.
constexpr int kMantissaBits = 53;
constexpr std::uint64_t kLimbMask = 0xFFFFFFFFU;

bool bit(std::span<const std::uint64_t> limbs, int index) {
  return ((limbs[static_cast<std::size_t>(index / kLimbBits)] >> (index % kLimbBits)) & 1U) != 0;
}

}  // namespace

void ExactSum::add(double value) {
  PANNIER_CHECK(value >= 0 && value <= 0x1p300,
                fmt::format("an exact sum takes numbers from 0 to 2^300, got {}", value));
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);  // In [0.5, 1), or 0.
  auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, kMantissaBits));
  int position = exponent - kMantissaBits - kLeastExponent;
  if (position < 0) {
    mantissa = position > -kMantissaBits ? mantissa >> -position : 0;
    position = 0;
  }
  const auto limb = static_cast<std::size_t>(position / kLimbBits);
  const int shift = position % kLimbBits;
  limbs_[limb] += static_cast<std::int64_t>((mantissa << shift) & kLimbMask);
  limbs_[limb + 1] += static_cast<std::int64_t>((mantissa >> (kLimbBits - shift)) & kLimbMask);
  limbs_[limb + 2] += static_cast<std::int64_t>((mantissa >> kLimbBits) >> (kLimbBits - shift));
}

void ExactSum::add(const ExactSum& other) {
  for (std::size_t i = 0; i < limbs_.size(); ++i) {
    limbs_[i] += other.limbs_[i];
  }
}

void ExactSum::carry() {
  for (std::size_t i = 0; i + 1 < limbs_.size(); ++i) {
    limbs_[i + 1] += limbs_[i] >> kLimbBits;
    limbs_[i] &= static_cast<std::int64_t>(kLimbMask);
  }
}

double ExactSum::value() const {
  ExactSum carried = *this;
  carried.carry();
  std::array<std::uint64_t, kNumLimbs + 1> limbs{};  // The top limb may hold more than 32 bits.
  for (std::size_t i = 0; i < carried.limbs_.size(); ++i) {
    limbs[i] = static_cast<std::uint64_t>(carried.limbs_[i]);
  }
  limbs[kNumLimbs] = limbs[kNumLimbs - 1] >> kLimbBits;
  limbs[kNumLimbs - 1] &= kLimbMask;

  int highest = (kNumLimbs + 1) * kLimbBits - 1;
  while (highest > 0 && !bit(limbs, highest)) {
    --highest;
  }
  std::uint64_t mantissa = 0;
  const int lowest = highest - kMantissaBits + 1;
  for (int i = highest; i >= std::max(lowest, 0); --i) {
    mantissa = (mantissa << 1) | (bit(limbs, i) ? 1U : 0U);
  }
  if (lowest <= 0) {
    return std::ldexp(static_cast<double>(mantissa), kLeastExponent);
  }
  bool sticky = false;
  for (int i = 0; i < lowest - 1 && !sticky; ++i) {
    sticky = bit(limbs, i);
  }
  const bool half = bit(limbs, lowest - 1);
  mantissa += half && (sticky || (mantissa & 1U) != 0) ? 1U : 0U;
  return std::ldexp(static_cast<double>(mantissa), lowest + kLeastExponent);
}

}  // namespace pannier::kernels
