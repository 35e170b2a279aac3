#include "pannier/kernels/exact_sum.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "pannier/base/error.h"

namespace pannier::kernels {
namespace {

ExactSum sum_of(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) {
    sum.add(value);
  }
  return sum;
}

std::vector<double> random_values(std::size_t count, std::mt19937_64& random) {
  std::uniform_real_distribution<double> mantissa(0.5, 1.0);
  std::vector<double> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(std::ldexp(mantissa(random), static_cast<int>(random() % 580) - 280));
  }
  return values;
}

TEST(ExactSum, DoesNotDependOnOrder) {
  std::mt19937_64 random(1);
  auto values = random_values(2000, random);
  const ExactSum expected = sum_of(values);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(values.begin(), values.end(), random);
    const ExactSum actual = sum_of(values);
    EXPECT_TRUE(std::ranges::equal(actual.limbs(), expected.limbs()));
    EXPECT_EQ(actual.value(), expected.value());
  }
}

TEST(ExactSum, AddsLimbsAsIntegers) {
  std::mt19937_64 random(2);
  ExactSum whole;
  ExactSum merged;
  for (int part = 0; part < 5; ++part) {
    const auto values = random_values(300, random);
    for (const double value : values) {
      whole.add(value);
    }
    ExactSum partial = sum_of(values);
    if (part % 2 == 0) {
      partial.carry();
    }
    for (std::size_t i = 0; i < merged.limbs().size(); ++i) {
      merged.limbs()[i] += partial.limbs()[i];
    }
  }
  EXPECT_EQ(merged.value(), whole.value());
  merged.carry();
  whole.carry();
  EXPECT_TRUE(std::ranges::equal(merged.limbs(), whole.limbs()));
}

TEST(ExactSum, GivesBackOneNumber) {
  std::mt19937_64 random(3);
  for (const double value : random_values(2000, random)) {
    EXPECT_EQ(sum_of({value}).value(), value);
  }
  for (const double value : {0.0, 1.0, 0x1p300, 0x1p-298, 0x1p-340, 0x1.fffffffffffffp299}) {
    EXPECT_EQ(sum_of({value}).value(), value);
  }
}

TEST(ExactSum, LosesNothingToSize) {
  EXPECT_EQ(sum_of({0x1p300, 0x1p-298}).value(), 0x1p300);
  EXPECT_EQ(sum_of({1.0, 0x1p-53}).value(), 1.0);                    // A tie goes to even.
  EXPECT_EQ(sum_of({1.0, 0x1p-53, 0x1p-290}).value(), 1 + 0x1p-52);  // Just over a tie.
  EXPECT_EQ(sum_of({1 + 0x1p-52, 0x1p-53}).value(), 1 + 0x1p-51);    // A tie from an odd mantissa.
  EXPECT_EQ(sum_of(std::vector<double>(1024, 0x1p-60)).value(), 0x1p-50);
  EXPECT_EQ(sum_of({2 - 0x1p-52, 0x1p-53}).value(), 2.0);  // Rounding carries into the exponent.
}

TEST(ExactSum, AgreesWithIntegers) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 200; ++trial) {
    std::uint64_t expected = 0;
    ExactSum sum;
    for (int i = 0; i < 50; ++i) {
      const std::uint64_t value = random() >> (11 + random() % 50);
      expected += value;
      sum.add(static_cast<double>(value));
    }
    EXPECT_EQ(sum.value(), static_cast<double>(expected));  // C++ rounds this conversion to nearest even.
  }
}

TEST(ExactSum, DropsWhatIsTooSmall) {
  EXPECT_EQ(sum_of({0x1p-341}).value(), 0.0);
  EXPECT_EQ(sum_of({0x1p-340 + 0x1p-341}).value(), 0x1p-340);
  EXPECT_EQ(sum_of({std::numeric_limits<double>::denorm_min()}).value(), 0.0);
}

TEST(ExactSum, HoldsManyOfTheLargest) {
  ExactSum sum = sum_of(std::vector<double>(1024, 0x1p300));
  for (int i = 0; i < 20; ++i) {
    sum.add(ExactSum(sum));  // Doubles.
  }
  EXPECT_EQ(sum.value(), 0x1p330);
}

TEST(ExactSum, RefusesWhatItCannotHold) {
  ExactSum sum;
  for (const double value : {-1.0, 0x1.0000000000001p300, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(sum.add(value), InternalError);
  }
  EXPECT_EQ(sum.value(), 0.0);
}

}  // namespace
}  // namespace pannier::kernels
