#include "pannier/kernels/gradient.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>

#include "pannier/base/thread_team.h"
#include "pannier/kernels/reference_gradient.h"
#include "tests/kernels/hostile_float_modes.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

using kernels::accumulate;
using kernels::available_targets;
using kernels::ExactSum;
using kernels::gradient_stats;
using kernels::GradientStats;
using pannier::kBlockNumel;

constexpr std::array<GradType, 3> kTypes = {GradType::kFp32, GradType::kFp16, GradType::kBf16};

FencedBuffer random_gradient(GradType type, std::int64_t numel, std::mt19937& random, bool finite) {
  FencedBuffer grad(static_cast<std::size_t>(numel) * grad_nbytes(type));
  fill_gradient(grad, type, random);
  for (std::int64_t i = 0; finite && i < numel; ++i) {
    if (!std::isfinite(kernels::reference::load_gradient(grad.as<void>(), type, i))) {
      std::memset(grad.as<char>() + static_cast<std::size_t>(i) * grad_nbytes(type), 1, grad_nbytes(type));
    }
  }
  return grad;
}

const void* at(const FencedBuffer& grad, GradType type, std::int64_t i) {
  return grad.as<char>() + static_cast<std::size_t>(i) * grad_nbytes(type);
}

GradientStats plain_stats(const FencedBuffer& grad, GradType type, std::int64_t numel) {
  GradientStats stats;
  for (std::int64_t begin = 0; begin < numel; begin += kBlockNumel) {
    const std::int64_t count = std::min(kBlockNumel, numel - begin);
    std::int64_t num_nonfinite = 0;
    for (std::int64_t i = begin; i < begin + count; ++i) {
      num_nonfinite += std::isfinite(kernels::reference::load_gradient(grad.as<void>(), type, i)) ? 0 : 1;
    }
    if (num_nonfinite == 0) {
      stats.sum_of_squares.add(kernels::reference::block_sum(at(grad, type, begin), type, count));
    }
    stats.num_nonfinite += num_nonfinite;
  }
  return stats;
}

std::vector<std::int64_t> all_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t numel = 0; numel <= 70; ++numel) {
    sizes.push_back(numel);
  }
  sizes.insert(sizes.end(), {4095, 4096, 4097, 40001});
  return sizes;
}

TEST(GradientStats, MatchReferenceBitForBit) {
  std::mt19937 random(1);
  for (const auto type : kTypes) {
    for (const auto numel : all_sizes()) {
      for (const bool finite : {true, false}) {
        const FencedBuffer grad = random_gradient(type, numel, random, finite);
        const GradientStats expected = plain_stats(grad, type, numel);
        EXPECT_TRUE(!finite || expected.num_nonfinite == 0);
        for (const auto& target : available_targets()) {
          const GradientStats actual = gradient_stats(grad.as<void>(), type, numel, serial_for, target);
          ASSERT_EQ(actual.sum_of_squares.value(), expected.sum_of_squares.value()) << target << " " << numel;
          ASSERT_EQ(actual.num_nonfinite, expected.num_nonfinite) << target << " " << numel;
        }
      }
    }
  }
}

TEST(GradientStats, DoNotDependOnThreadsOrCuts) {
  std::mt19937 random(2);
  constexpr std::int64_t kNumel = 50 * kBlockNumel + 77;
  const FencedBuffer grad = random_gradient(GradType::kFp32, kNumel, random, true);
  const ExactSum expected = gradient_stats(grad.as<void>(), GradType::kFp32, kNumel, serial_for).sum_of_squares;
  for (const int num_threads : {2, 3, 4}) {
    ThreadTeam team(num_threads);
    const auto actual = gradient_stats(grad.as<void>(), GradType::kFp32, kNumel, team.parallel_for());
    EXPECT_TRUE(std::ranges::equal(actual.sum_of_squares.limbs(), expected.limbs()));
  }
  for (const std::int64_t cut : {1, 13, 50}) {
    const std::int64_t at_element = cut * kBlockNumel;
    ExactSum sum =
        gradient_stats(at(grad, GradType::kFp32, at_element), GradType::kFp32, kNumel - at_element, serial_for)
            .sum_of_squares;
    sum.add(gradient_stats(grad.as<void>(), GradType::kFp32, at_element, serial_for).sum_of_squares);
    EXPECT_EQ(sum.value(), expected.value());
  }
}

TEST(GradientStats, AreTheNorm) {
  const std::vector<float> grad = {3.0F, -4.0F, 0x1p-149F, 0.0F};
  const auto stats = gradient_stats(grad.data(), GradType::kFp32, 4, serial_for);
  EXPECT_EQ(stats.sum_of_squares.value(), 25.0);
  const std::vector<float> largest(10000, std::numeric_limits<float>::max());
  const double square = std::pow(static_cast<double>(std::numeric_limits<float>::max()), 2);
  const auto large = gradient_stats(largest.data(), GradType::kFp32, 10000, serial_for);
  EXPECT_EQ(large.num_nonfinite, 0);
  EXPECT_NEAR(large.sum_of_squares.value() / square, 10000, 1e-9);
}

TEST(GradientStats, LeaveOutOnlyBlocksWithNonfiniteElements) {
  std::vector<float> grad(3 * kBlockNumel, 1.0F);
  grad[kBlockNumel + 5] = std::numeric_limits<float>::infinity();
  grad[kBlockNumel + 6] = std::numeric_limits<float>::quiet_NaN();
  for (const auto& target : available_targets()) {
    const auto stats = gradient_stats(grad.data(), GradType::kFp32, 3 * kBlockNumel, serial_for, target);
    EXPECT_EQ(stats.num_nonfinite, 2);
    EXPECT_EQ(stats.sum_of_squares.value(), 2.0 * kBlockNumel);
  }
}

TEST(GradientStats, IgnoreAndRestoreTheCallersFloatModes) {
  std::mt19937 random(3);
  const FencedBuffer grad = random_gradient(GradType::kFp32, 9999, random, true);
  for (const auto& target : available_targets()) {
    const double expected =
        gradient_stats(grad.as<void>(), GradType::kFp32, 9999, serial_for, target).sum_of_squares.value();
    const HostileFloatModes modes;
    const auto actual = gradient_stats(grad.as<void>(), GradType::kFp32, 9999, serial_for, target);
    EXPECT_TRUE(modes.are_unchanged());
    EXPECT_EQ(actual.sum_of_squares.value(), expected);
  }
}

TEST(Accumulate, MatchesReferenceBitForBit) {
  std::mt19937 random(4);
  for (const auto type : kTypes) {
    for (const auto numel : all_sizes()) {
      for (const bool first : {true, false}) {
        const FencedBuffer grad = random_gradient(type, numel, random, false);
        const FencedBuffer start = random_gradient(GradType::kFp32, numel, random, false);
        const FencedBuffer expected = start;
        kernels::reference::accumulate(expected.as<float>(), grad.as<void>(), type, numel, first);
        for (const auto& target : available_targets()) {
          const FencedBuffer actual = start;
          const HostileFloatModes modes;
          accumulate(actual.as<float>(), grad.as<void>(), type, numel, first, serial_for, target);
          ASSERT_TRUE(modes.are_unchanged());
          ASSERT_TRUE(actual == expected) << target << " " << numel;
          ASSERT_TRUE(actual.is_guard_intact());
        }
      }
    }
  }
}

TEST(Accumulate, DoesNotDependOnThreads) {
  std::mt19937 random(5);
  constexpr std::int64_t kNumel = 300007;
  const FencedBuffer grad = random_gradient(GradType::kBf16, kNumel, random, false);
  const FencedBuffer start = random_gradient(GradType::kFp32, kNumel, random, false);
  const FencedBuffer expected = start;
  accumulate(expected.as<float>(), grad.as<void>(), GradType::kBf16, kNumel, false, serial_for);
  for (const int num_threads : {2, 3, 4}) {
    ThreadTeam team(num_threads);
    const FencedBuffer actual = start;
    accumulate(actual.as<float>(), grad.as<void>(), GradType::kBf16, kNumel, false, team.parallel_for());
    EXPECT_TRUE(actual == expected);
  }
}

}  // namespace
}  // namespace pannier::testing
