#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <limits>

#include "pannier/kernels/cuda/convert.h"
#include "pannier/kernels/cuda/decision.h"
#include "pannier/kernels/cuda/gradient.h"
#include "pannier/kernels/reference.h"
#include "tests/kernels/cuda_arena.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

namespace cuda = kernels::cuda;
using kernels::ExactSum;
using kernels::GradientStats;

constexpr std::array<GradType, 3> kTypes = {GradType::kFp32, GradType::kFp16, GradType::kBf16};

class CudaGradientStats : public CudaTest {};
class CudaDecision : public CudaTest {};
class CudaAccumulate : public CudaTest {};
class CudaConvert : public CudaTest {};

// Gradients in an arena, one in three at odd addresses.
struct Gradients {
  Gradients(GradType type, bool finite, std::uint32_t seed) : arena(seed) {
    std::mt19937 random(seed);
    std::size_t i = 0;
    for (const auto numel : cuda_sizes()) {
      FencedBuffer grad(static_cast<std::size_t>(numel) * grad_nbytes(type));
      fill_gradient(grad, type, random);
      for (std::int64_t k = 0; finite && k < numel; ++k) {
        if (!std::isfinite(kernels::reference::load_gradient(grad.as<void>(), type, k))) {
          std::memset(grad.as<char>() + static_cast<std::size_t>(k) * grad_nbytes(type), 1, grad_nbytes(type));
        }
      }
      offsets.push_back(arena.append(grad.as<char>(), grad.nbytes(), i++ % 3 == 1 ? grad_nbytes(type) : 0));
    }
    arena.close();
  }

  Arena arena;
  std::vector<std::size_t> offsets;
};

std::int64_t nonfinite_in(const unsigned char* grad, GradType type, std::int64_t numel) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    count += std::isfinite(kernels::reference::load_gradient(grad, type, i)) ? 0 : 1;
  }
  return count;
}

// Adds what reference.h finds in one run, and returns its count of non-finite elements.
std::int64_t add_plain_stats(const unsigned char* grad, GradType type, std::int64_t numel, GradientStats& stats) {
  std::int64_t total = 0;
  for (std::int64_t begin = 0; begin < numel; begin += kBlockNumel) {
    const std::int64_t count = std::min(kBlockNumel, numel - begin);
    const auto* block = grad + static_cast<std::size_t>(begin) * grad_nbytes(type);
    const std::int64_t num_nonfinite = nonfinite_in(block, type, count);
    if (num_nonfinite == 0) {
      stats.sum_of_squares.add(kernels::reference::block_sum(block, type, count));
    }
    total += num_nonfinite;
  }
  stats.num_nonfinite += total;
  return total;
}

std::vector<std::int64_t> limbs_of(ExactSum sum) {
  sum.carry();
  return {sum.limbs().begin(), sum.limbs().end()};
}

TEST_F(CudaGradientStats, MatchReferenceBitForBit) {
  const auto sizes = cuda_sizes();
  for (const auto type : kTypes) {
    for (const bool finite : {true, false}) {
      SCOPED_TRACE(fmt::format("type {}, finite {}", static_cast<int>(type), finite));
      Gradients gradients(type, finite, 5);
      const DeviceArray<unsigned char> device(gradients.arena.bytes());
      GradientStats expected;
      std::vector<std::int64_t> expected_by_run;
      std::vector<cuda::GradientRun> runs;
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const auto offset = gradients.offsets[i];
        expected_by_run.push_back(add_plain_stats(gradients.arena.bytes().data() + offset, type, sizes[i], expected));
        runs.push_back({device.data() + offset, sizes[i], 0});
      }
      const std::int64_t num_blocks = cuda::number_blocks(runs);
      const DeviceArray<cuda::GradientRun> device_runs(runs);
      const DeviceArray<cuda::DeviceGradientStats> stats(std::vector<cuda::DeviceGradientStats>(1));
      const DeviceArray<std::int64_t> by_run(std::vector<std::int64_t>(sizes.size()));
      cuda::gradient_stats(device_runs.data(), static_cast<int>(runs.size()), num_blocks, type, stats.data(),
                           by_run.data(), nullptr);
      const GradientStats actual = cuda::to_host_stats(stats.read()[0]);
      EXPECT_EQ(limbs_of(actual.sum_of_squares), limbs_of(expected.sum_of_squares));
      EXPECT_EQ(actual.num_nonfinite, expected.num_nonfinite);
      EXPECT_EQ(by_run.read(), expected_by_run);
      EXPECT_TRUE(device.read() == gradients.arena.bytes());
    }
  }
}

TEST_F(CudaGradientStats, DoNotDependOnLaunches) {
  std::mt19937 random(6);
  constexpr std::int64_t kNumel = 3000 * kBlockNumel + 77;
  std::vector<float> grad(kNumel);
  for (float& x : grad) {
    x = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0xBFFFFFFFU);  // Finite, of every size below 2.
  }
  GradientStats expected;
  add_plain_stats(reinterpret_cast<const unsigned char*>(grad.data()), GradType::kFp32, kNumel, expected);
  const DeviceArray<float> device(grad);
  for (const std::int64_t cut : {0, 1, 1777}) {
    std::vector<cuda::GradientRun> runs = {{device.data(), cut * kBlockNumel, 0},
                                           {device.data() + cut * kBlockNumel, kNumel - cut * kBlockNumel, 0}};
    const DeviceArray<cuda::DeviceGradientStats> stats(std::vector<cuda::DeviceGradientStats>(1));
    for (auto& run : runs) {
      const std::int64_t num_blocks = cuda::number_blocks({&run, 1});
      const DeviceArray<cuda::GradientRun> device_run(std::vector<cuda::GradientRun>{run});
      cuda::gradient_stats(device_run.data(), 1, num_blocks, GradType::kFp32, stats.data(), nullptr, nullptr);
    }
    EXPECT_EQ(limbs_of(cuda::to_host_stats(stats.read()[0]).sum_of_squares), limbs_of(expected.sum_of_squares));
  }
}

// The host's expressions.
TEST_F(CudaDecision, IsTheHosts) {
  std::mt19937_64 random(7);
  const DeviceArray<cuda::DeviceGradientStats> device_stats(1);
  const DeviceArray<kernels::Decision> device_decision(1);
  for (int round = 0; round < 4000; ++round) {
    GradientStats stats;
    const auto count = static_cast<int>(random() % 6);
    const auto base = static_cast<int>(random() % 550) - 280;
    for (int i = 0; i < count; ++i) {
      const double mantissa = static_cast<double>(random() >> 11) * 0x1p-53;
      stats.sum_of_squares.add(std::ldexp(mantissa, base - static_cast<int>(random() % 60)));
    }
    if (count > 0 && round % 4 == 0) {  // Half way between two numbers: a tie, or just above one.
      stats.sum_of_squares = {};
      const auto odd_or_even = static_cast<double>((random() >> 11) | 0x10000000000000ULL);
      stats.sum_of_squares.add(std::ldexp(odd_or_even, base / 2));
      stats.sum_of_squares.add(std::ldexp(1.0, base / 2 - 1));
      stats.sum_of_squares.add(round % 8 == 0 ? 0.0 : std::ldexp(1.0, base / 2 - 150));
    }
    stats.num_nonfinite = round % 7 == 0 ? round % 14 : 0;
    const kernels::DecisionInputs inputs{.scale = round % 3 == 0 ? 1.0 : std::ldexp(1.0, round % 20),
                                         .clip = round % 5 == 0 ? 0.0 : 1.0,
                                         .skips_nonfinite = round % 2 == 0};
    cuda::DeviceGradientStats from{};
    std::copy(stats.sum_of_squares.limbs().begin(), stats.sum_of_squares.limbs().end(), std::begin(from.limbs));
    from.num_nonfinite = stats.num_nonfinite;
    require_cuda(cudaMemcpy(device_stats.data(), &from, sizeof from, cudaMemcpyHostToDevice));
    cuda::decide(device_stats.data(), inputs, device_decision.data(), nullptr);
    const kernels::Decision actual = device_decision.read()[0];
    const kernels::Decision expected = kernels::decide(stats, inputs);
    ASSERT_EQ(actual.sum_of_squares, expected.sum_of_squares) << round;
    ASSERT_EQ(actual.norm, expected.norm) << round;
    ASSERT_EQ(actual.num_nonfinite, expected.num_nonfinite) << round;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(actual.grad_factor), std::bit_cast<std::uint32_t>(expected.grad_factor));
    ASSERT_EQ(actual.skip, expected.skip) << round;
  }
}

TEST_F(CudaAccumulate, MatchesReferenceBitForBit) {
  const auto sizes = cuda_sizes();
  for (const auto type : kTypes) {
    for (const bool first : {true, false}) {
      SCOPED_TRACE(fmt::format("type {}, first {}", static_cast<int>(type), first));
      Gradients grads(type, false, 8);
      Gradients sums(GradType::kFp32, false, 9);
      const DeviceArray<unsigned char> device_grads(grads.arena.bytes());
      const DeviceArray<unsigned char> device_sums(sums.arena.bytes());
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        cuda::accumulate(reinterpret_cast<float*>(device_sums.data() + sums.offsets[i]),
                         device_grads.data() + grads.offsets[i], type, sizes[i], first, nullptr);
        kernels::reference::accumulate(reinterpret_cast<float*>(sums.arena.bytes().data() + sums.offsets[i]),
                                       grads.arena.bytes().data() + grads.offsets[i], type, sizes[i], first);
      }
      EXPECT_TRUE(device_sums.read() == sums.arena.bytes());
    }
  }
}

TEST_F(CudaAccumulate, WidensEveryFp16) {
  std::vector<std::uint16_t> all(1U << 16);
  std::vector<float> expected(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
    expected[i] = kernels::reference::canonical(kernels::reference::from_fp16(all[i]));
  }
  const DeviceArray<std::uint16_t> from(all);
  const DeviceArray<float> to(all.size());
  cuda::accumulate(to.data(), from.data(), GradType::kFp16, static_cast<std::int64_t>(all.size()), true, nullptr);
  EXPECT_EQ(std::memcmp(to.read().data(), expected.data(), expected.size() * sizeof(float)), 0);
}

// Every 251st bit pattern of fp32, and those around every fp16.
std::vector<float> many_floats() {
  std::vector<float> all;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 251) {
    all.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (std::uint32_t half = 0; half < (1U << 16); ++half) {
    const auto bits = std::bit_cast<std::uint32_t>(kernels::reference::from_fp16(static_cast<std::uint16_t>(half)));
    for (const std::uint32_t away : {0U, 1U, 0xFFFFFFFFU, 0x1000U, 0xFFFU, 0x1001U}) {
      all.push_back(std::bit_cast<float>(bits + away));
    }
  }
  all.resize(all.size() - all.size() % 1024 + 5);
  return all;
}

TEST_F(CudaConvert, SplitsJoinsAndRoundsAsReferenceDoes) {
  const auto from = many_floats();
  const std::size_t count = from.size();
  const DeviceArray<float> master(from);
  const DeviceArray<std::uint16_t> hi(count);
  const DeviceArray<std::int16_t> lo(count);
  const DeviceArray<std::uint16_t> half(count);
  const auto numel = static_cast<std::int64_t>(count);
  cuda::split_master(master.data(), hi.data(), lo.data(), numel, nullptr);
  cuda::to_fp16(master.data(), half.data(), numel, nullptr);
  cuda::join_master(hi.data(), lo.data(), master.data(), numel, nullptr);
  const auto actual_hi = hi.read();
  const auto actual_lo = lo.read();
  const auto actual_half = half.read();
  const auto joined = master.read();
  for (std::size_t i = 0; i < count; ++i) {
    const auto parts = kernels::reference::split(from[i]);
    ASSERT_EQ(actual_hi[i], parts.hi) << i;
    ASSERT_EQ(actual_lo[i], parts.lo) << i;
    ASSERT_EQ(actual_half[i], kernels::reference::to_fp16(from[i])) << i;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(joined[i]),
              std::bit_cast<std::uint32_t>(kernels::reference::canonical(from[i])));
  }
}

TEST_F(CudaConvert, JoinsAStaleRestAsReferenceDoes) {
  std::vector<std::uint16_t> hi;
  std::vector<std::int16_t> lo;
  for (std::uint32_t bits = 0; bits < (1U << 16); ++bits) {
    for (const std::int16_t rest : {std::int16_t{0}, std::int16_t{-1}, std::int16_t{1}, std::int16_t{-32768}}) {
      hi.push_back(static_cast<std::uint16_t>(bits));
      lo.push_back(rest);
    }
  }
  const DeviceArray<std::uint16_t> device_hi(hi);
  const DeviceArray<std::int16_t> device_lo(lo);
  const DeviceArray<float> device_master(hi.size() + 1);
  for (const std::size_t misalignment : {0U, 1U}) {
    cuda::join_master(device_hi.data(), device_lo.data(), device_master.data() + misalignment,
                      static_cast<std::int64_t>(hi.size()), nullptr);
    const auto master = device_master.read();
    for (std::size_t i = 0; i < hi.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(master[i + misalignment]),
                std::bit_cast<std::uint32_t>(kernels::reference::join(hi[i], lo[i])));
    }
  }
}

}  // namespace
}  // namespace pannier::testing
