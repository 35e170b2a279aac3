// A sum of non-negative fp64 numbers that does not depend on their order: fixed point wide enough for every finite
// double that a block of squared fp32 gradients can give, in limbs of 32 bits kept in int64, so that ranks may add
// limbs as integers.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace pannier::kernels {

/// An exact accumulator. Addition is associative and commutative bit for bit.
class ExactSum {
 public:
  static constexpr int kNumLimbs = 22;

  /// Adds a finite non-negative number of at most 2^300; bits below 2^-340 are dropped. Throws InternalError otherwise.
  void add(double value);
  /// Adds another sum.
  void add(const ExactSum& other);
  /// Carries between limbs, so that each but the last lies in [0, 2^32); the number stays the same. Limbs of carried
  /// sums can be added 2^31 times before the next carry.
  void carry();
  /// The sum rounded to the nearest fp64.
  [[nodiscard]] double value() const;
  /// The limbs, least significant first, in the redundant form that integer addition keeps valid.
  [[nodiscard]] std::span<const std::int64_t, kNumLimbs> limbs() const { return limbs_; }
  [[nodiscard]] std::span<std::int64_t, kNumLimbs> limbs() { return limbs_; }

 private:
  std::array<std::int64_t, kNumLimbs> limbs_{};
};

}  // namespace pannier::kernels
