#include "pannier/kernels/convert.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "pannier/base/thread_team.h"
#include "pannier/kernels/reference_bits.h"
#include "pannier/kernels/update.h"
#include "tests/kernels/hostile_float_modes.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

using kernels::available_targets;
namespace reference = kernels::reference;

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// Every sign and exponent with mantissas at the edges of rounding, and 2^24 random bit patterns.
std::vector<float> many_floats() {
  std::vector<float> floats;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7FFEU, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFEU, 0xFFFFU}) {
      floats.push_back(float_of(high << 16 | low));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 24; ++i) {
    floats.push_back(float_of(static_cast<std::uint32_t>(random())));
  }
  return floats;
}

TEST(SplitMaster, GivesBackEveryBit) {
  const auto floats = many_floats();
  const auto numel = static_cast<std::int64_t>(floats.size());
  std::vector<std::uint16_t> hi(floats.size());
  std::vector<std::int16_t> lo(floats.size());
  std::vector<float> joined(floats.size());
  ThreadTeam team(2);
  for (const auto& target : available_targets()) {
    kernels::split_master(floats.data(), hi.data(), lo.data(), numel, team.parallel_for(), target);
    kernels::join_master(hi.data(), lo.data(), joined.data(), numel, team.parallel_for(), target);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      const auto expected = std::isnan(floats[i]) ? reference::kCanonicalNan : bits_of(floats[i]);
      ASSERT_EQ(bits_of(joined[i]), expected) << target << " " << bits_of(floats[i]);
      const auto parts = reference::split(floats[i]);
      ASSERT_TRUE(parts.hi == hi[i] && parts.lo == lo[i]) << target << " " << bits_of(floats[i]);
    }
  }
}

TEST(SplitMaster, RoundsHalfAwayFromZero) {
  EXPECT_EQ(reference::split(float_of(0x3F808000U)).hi, 0x3F81);
  EXPECT_EQ(reference::split(float_of(0xBF808000U)).hi, 0xBF81);
  EXPECT_EQ(reference::split(float_of(0x3F807FFFU)).hi, 0x3F80);
  EXPECT_EQ(reference::split(float_of(0x7F7FFFFFU)).hi, 0x7F80);
  EXPECT_EQ(reference::split(float_of(0x7FFFFFFFU)).hi, 0x7FC0);
  EXPECT_EQ(reference::split(float_of(0xFF800001U)).lo, 0);
}

TEST(JoinMaster, NeverMakesNanOfAnEditedParameter) {
  std::vector<std::uint16_t> hi;
  std::vector<std::int16_t> lo;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const int low : {0, 1, -1, 32767, -32768, 12345, -12345}) {
      hi.push_back(static_cast<std::uint16_t>(high));
      lo.push_back(static_cast<std::int16_t>(low));
    }
  }
  std::vector<float> joined(hi.size());
  for (const auto& target : available_targets()) {
    kernels::join_master(hi.data(), lo.data(), joined.data(), static_cast<std::int64_t>(hi.size()), serial_for, target);
    for (std::size_t i = 0; i < hi.size(); ++i) {
      ASSERT_EQ(std::isnan(joined[i]), std::isnan(reference::from_bf16(hi[i]))) << hi[i] << " " << lo[i];
      ASSERT_EQ(bits_of(joined[i]), bits_of(reference::join(hi[i], lo[i]))) << hi[i] << " " << lo[i];
    }
  }
}

TEST(JoinMaster, TakesRestAsZeroAfterZeroingTheParameter) {
  EXPECT_EQ(bits_of(reference::join(0x0000, -5)), 0U);
  EXPECT_EQ(bits_of(reference::join(0x8000, -5)), 0x80000000U);
  EXPECT_EQ(bits_of(reference::join(0x7F80, 5)), 0x7F800000U);
  EXPECT_EQ(bits_of(reference::join(0x0000, 5)), 5U);
}

TEST(Fp16, GivesBackEveryNumber) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const bool is_nan = (bits & 0x7FFFU) > 0x7C00U;
    EXPECT_EQ(reference::to_fp16(reference::from_fp16(half)), is_nan ? 0x7E00 : half);
  }
  EXPECT_EQ(reference::from_fp16(0x3C01), 1 + 0x1p-10F);
  EXPECT_EQ(reference::from_fp16(0x0001), 0x1p-24F);
  EXPECT_EQ(reference::from_fp16(0xFBFF), -65504.0F);
}

TEST(Fp16, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const auto below = static_cast<std::uint16_t>(bits);
    const auto above = static_cast<std::uint16_t>(bits + 1);
    const float low = reference::from_fp16(below);
    const float high = bits + 1 == 0x7C00 ? 65536.0F : reference::from_fp16(above);
    const float middle = low + (high - low) / 2;  // Exact in fp32.
    EXPECT_EQ(reference::to_fp16(middle), bits % 2 == 0 ? below : above);
    EXPECT_EQ(reference::to_fp16(std::nextafter(middle, low)), below);
    EXPECT_EQ(reference::to_fp16(std::nextafter(middle, high)), above);
    EXPECT_EQ(reference::to_fp16(-middle), 0x8000 | (bits % 2 == 0 ? below : above));
  }
}

TEST(Fp16, MatchesReferenceOnEveryTarget) {
  const auto floats = many_floats();
  std::vector<std::uint16_t> halves(floats.size());
  for (const auto& target : available_targets()) {
    const HostileFloatModes modes;
    kernels::to_fp16(floats.data(), halves.data(), static_cast<std::int64_t>(floats.size()), serial_for, target);
    for (std::size_t i = 0; i < floats.size(); ++i) {
      ASSERT_EQ(halves[i], reference::to_fp16(floats[i])) << target << " " << bits_of(floats[i]);
    }
  }
}

TEST(Conversions, StayInsideTheirBuffers) {
  std::mt19937 random(2);
  for (std::size_t numel = 0; numel <= 70; ++numel) {
    FencedBuffer from(4 * numel);
    fill_gradient(from, GradType::kFp32, random);
    for (const auto& target : available_targets()) {
      const FencedBuffer hi(2 * numel);
      const FencedBuffer lo(2 * numel);
      const FencedBuffer joined(4 * numel);
      const FencedBuffer half(2 * numel);
      const auto count = static_cast<std::int64_t>(numel);
      kernels::split_master(from.as<float>(), hi.as<std::uint16_t>(), lo.as<std::int16_t>(), count, serial_for, target);
      kernels::join_master(hi.as<std::uint16_t>(), lo.as<std::int16_t>(), joined.as<float>(), count, serial_for,
                           target);
      kernels::to_fp16(from.as<float>(), half.as<std::uint16_t>(), count, serial_for, target);
      for (std::size_t i = 0; i < numel; ++i) {
        ASSERT_EQ(bits_of(joined.as<float>()[i]), bits_of(reference::canonical(from.as<float>()[i])));
        ASSERT_EQ(half.as<std::uint16_t>()[i], reference::to_fp16(from.as<float>()[i]));
      }
      ASSERT_TRUE(hi.is_guard_intact() && lo.is_guard_intact() && joined.is_guard_intact() && half.is_guard_intact());
    }
  }
}

}  // namespace
}  // namespace pannier::testing
