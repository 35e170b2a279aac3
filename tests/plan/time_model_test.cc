#include "pannier/plan/time_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// A model of 1.54 billion parameters at 16k tokens on one H200 with PCIe 5.
SplitInput large_model() {
  return {.numel = 1'540'000'000,
          .observation = {.forward_s = 0.138, .backward_s = 0.360},
          .rates = {.up = 55e9, .down = 55e9, .host_update = 4.5e9}};
}

TEST(SolveSplit, BalancesTheDownLinkWithTheCores) {
  const SplitPlan plan = solve_split(large_model());
  EXPECT_NEAR(plan.streamed_share, 0.77, 0.005);
  EXPECT_NEAR(plan.exposed_s, 0.078, 0.002);
  EXPECT_NEAR(plan.predicted_step_s, 0.576, 0.002);
  EXPECT_DOUBLE_EQ(plan.streamed_share + plan.host_share, 1.0);
  EXPECT_EQ(plan.binds, "link down");
  EXPECT_NEAR(plan.times.link_down.needed_s, plan.times.link_down.window_s, 1e-4);
  EXPECT_NEAR(plan.times.cores.needed_s, plan.times.cores.window_s, 1e-4);
  EXPECT_TRUE(plan.windows_known);
}

TEST(SolveSplit, SlackOrOverlapHideNearlyAll) {
  SplitInput input = large_model();
  input.slack_nbytes = std::size_t{8} << 30;
  EXPECT_LE(solve_split(input).exposed_s, 0.03);
  EXPECT_GT(solve_split(input).kept_nbytes, std::size_t{7} << 30);
  input.slack_nbytes = 0;
  input.overlap_step = true;
  EXPECT_LE(solve_split(input).exposed_s, 0.03);
}

TEST(SolveSplit, WhatComesDownMustBeDownAtThePeak) {
  SplitInput input = large_model();
  const SplitPlan late = solve_split(input);
  input.observation.to_peak_s = 0.112;
  const SplitPlan early = solve_split(input);
  EXPECT_LT(early.streamed_share, late.streamed_share);
  EXPECT_GT(early.exposed_s, late.exposed_s);
  // 10 x P = D (to the peak + e), e = (1 - x) P / r.
  const double numel = 1.54e9;
  const double seconds = (1 - early.streamed_share) * numel / 4.5e9;
  EXPECT_NEAR(early.exposed_s, seconds, 1e-4);
  EXPECT_NEAR(10 * early.streamed_share * numel, 55e9 * (0.112 + seconds), 1e7);
  input.observation.to_peak_s = 1.0;  // No later than the forward ends.
  EXPECT_NEAR(solve_split(input).exposed_s, late.exposed_s, 1e-6);
  input.observation.to_peak_s = -1.0;
  EXPECT_THROW((void)solve_split(input), ConfigError);
}

TEST(SolveSplit, CountsWhatTheWayDownLosesBesideTheUpdate) {
  SplitInput input = large_model();
  input.rates.down_beside_update = 40e9;
  const SplitPlan plan = solve_split(input);
  EXPECT_GT(plan.exposed_s, solve_split(large_model()).exposed_s);
  const double seconds = plan.exposed_s;
  EXPECT_NEAR(10 * plan.streamed_share * 1.54e9, 40e9 * seconds + 55e9 * 0.138, 2e7);
  // Where it has all the time in the world the update costs it nothing.
  EXPECT_DOUBLE_EQ(evaluate_split(input, 0.01).exposed_s, evaluate_split(large_model(), 0.01).exposed_s);
}

TEST(SolveSplit, CountsTheMemoryThatHostPathAndCopiesShare) {
  SplitInput input = large_model();
  input.rates.dram = 140e9;
  const SplitPlan plan = solve_split(input);
  EXPECT_NEAR(plan.predicted_step_s, 0.590, 0.003);
  EXPECT_GT(plan.streamed_share, solve_split(large_model()).streamed_share);
  EXPECT_NEAR(plan.times.link_down.needed_s, plan.times.link_down.window_s, 1e-4);
}

TEST(SolveSplit, StaysWithinTheRoomAtTheEndOfBackward) {
  SplitInput input = large_model();
  input.room_nbytes = std::size_t{12} * 500'000'000;
  const SplitPlan plan = solve_split(input);
  EXPECT_LE(plan.streamed_share * static_cast<double>(input.numel), 500'000'000.0 * (1 + 1e-9));
  EXPECT_EQ(plan.most_streamed_numel, 500'000'000);
  EXPECT_EQ(plan.binds, "device memory");
  input.room_nbytes = 0;
  EXPECT_DOUBLE_EQ(solve_split(input).host_share, 1.0);
  input.room_nbytes = std::size_t{1} << 40;
  EXPECT_EQ(solve_split(input).binds, "link down");
}

TEST(SolveSplit, NamesWhatBinds) {
  SplitInput input = large_model();
  input.rates.up = 1e9;  // Nearly all goes to the host.
  EXPECT_EQ(solve_split(input).binds, "link up");
  input = large_model();
  input.rates.dram = 5e9;
  EXPECT_EQ(solve_split(input).binds, "DRAM");
  input = large_model();
  input.room_nbytes = 0;
  EXPECT_EQ(evaluate_split(input, 0.0).binds, "cores");
  input = large_model();
  input.observation = {.forward_s = 10, .backward_s = 10};
  input.rates.device_copy = 4e12;
  EXPECT_EQ(solve_split(input).binds, "nothing");
  EXPECT_NEAR(evaluate_split(input, 1.0).exposed_s, 0.010, 0.001);  // The update itself, on the device.
}

TEST(SolveSplit, CountsNothingAsHiddenWhereTimesAreUnknown) {
  SplitInput input = large_model();
  input.observation = {};
  const SplitPlan plan = solve_split(input);
  EXPECT_FALSE(plan.windows_known);
  // States and the host's gradients both come down while the host updates: (10 x + 2 (1 - x)) / 55 = (1 - x) / 4.5.
  EXPECT_NEAR(plan.streamed_share, (55 / 4.5 - 2) / (55 / 4.5 + 8), 1e-3);
  EXPECT_DOUBLE_EQ(plan.predicted_step_s, plan.exposed_s);
}

TEST(SolveSplit, CountsEachMicroBatch) {
  SplitInput input = large_model();
  input.micro_batches = 4;
  const SplitPlan plan = solve_split(input);
  EXPECT_NEAR(plan.predicted_step_s, 4 * 0.498 + plan.exposed_s, 1e-9);
}

TEST(SolveSplit, LivesWithNothingToDoAndNothingKnown) {
  SplitInput input = large_model();
  input.numel = 0;
  EXPECT_DOUBLE_EQ(solve_split(input).exposed_s, 0.0);
  input = {.numel = 1'000'000};
  EXPECT_DOUBLE_EQ(solve_split(input).predicted_step_s, 0.0);
  EXPECT_EQ(solve_split(input).binds, "nothing");
}

TEST(SolveSplit, RefusesWhatCannotBe) {
  SplitInput input = large_model();
  input.rates.up = -1;
  EXPECT_THROW((void)solve_split(input), ConfigError);
  input = large_model();
  input.observation.forward_s = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)solve_split(input), ConfigError);
  input = large_model();
  input.micro_batches = 0;
  EXPECT_THROW((void)solve_split(input), ConfigError);
  EXPECT_THROW((void)evaluate_split(large_model(), 1.01), ConfigError);
}

// Whether all work of a step fits when `exposed_s` seconds follow backward, told window by window.
bool step_fits(const SplitInput& in, double share, double exposed_s) {
  const double numel = static_cast<double>(in.numel);
  const double forward_s = *in.observation.forward_s;
  const double backward_s = *in.observation.backward_s;
  const double states = std::max(0.0, 10 * share * numel - static_cast<double>(in.slack_nbytes));
  const double host = (1 - share) * numel;
  // Backward: gradients of the host path go down while states go up.
  const double grad_s = std::min(backward_s, 2 * host / in.rates.down_both);
  const double up_hidden = std::min(grad_s * in.rates.up_both + (backward_s - grad_s) * in.rates.up,
                                    std::max(0.0, in.rates.dram * backward_s - 2 * host));
  const double up = std::max(0.0, states - up_hidden);
  const double down = states + std::max(0.0, 2 * host - backward_s * in.rates.down_both);
  // After it.
  const double host_window_s = exposed_s + (in.overlap_step ? forward_s : 0.0);
  const double up_s = (up + 2 * host) / in.rates.up_both;
  if (host > host_window_s * in.rates.host_update || up_s > host_window_s || up > exposed_s * in.rates.up_both ||
      26 * share * numel > exposed_s * in.rates.device_copy) {
    return false;
  }
  const double both_loss = down > 0 ? up_s * (in.rates.down - in.rates.down_both) : 0.0;
  if (down + both_loss > in.rates.down * (exposed_s + forward_s)) {
    return false;
  }
  if (in.overlap_step) {
    return 28 * host + up + down <= in.rates.dram * (exposed_s + forward_s);
  }
  const double down_beside_host = std::max(0.0, down - forward_s * std::min(in.rates.down, in.rates.dram));
  return 28 * host + up + down_beside_host <= in.rates.dram * exposed_s;
}

double least_exposed(const SplitInput& input, double share) {
  double low = 0;
  double high = 1e3;
  for (int i = 0; i < 80; ++i) {
    const double middle = (low + high) / 2;
    (step_fits(input, share, middle) ? high : low) = middle;
  }
  return high;
}

TEST(SolveSplit, IsNeverWorseThanBruteForce) {
  std::mt19937 random(7);
  const auto between = [&](double low, double high) {
    return std::exp(std::uniform_real_distribution<double>(std::log(low), std::log(high))(random));
  };
  for (int round = 0; round < 200; ++round) {
    SplitInput input{.numel = static_cast<std::int64_t>(between(1e8, 2e10)),
                     .slack_nbytes = round % 3 == 0 ? static_cast<std::size_t>(between(1e8, 3e10)) : 0,
                     .overlap_step = round % 2 == 0,
                     .observation = {.forward_s = between(0.02, 1.0), .backward_s = between(0.05, 2.0)},
                     .rates = {.up = between(5e9, 1e11),
                               .down = between(5e9, 1e11),
                               .dram = between(2e10, 5e11),
                               .host_update = between(2e8, 2e10),
                               .device_copy = between(5e11, 5e12)}};
    input.rates.up_both = input.rates.up * 0.9;
    input.rates.down_both = input.rates.down * 0.8;
    double best = least_exposed(input, 1.0);
    for (int i = 0; i < 1000; ++i) {
      const double share = i / 1000.0;
      const double exposed = least_exposed(input, share);
      best = std::min(best, exposed);
      if (i % 100 == 0) {
        EXPECT_NEAR(evaluate_split(input, share).exposed_s, exposed, 1e-6 + 1e-6 * exposed) << round << " " << share;
      }
    }
    EXPECT_LE(solve_split(input).exposed_s, best + 1e-5) << round;
  }
}

TEST(SplitInput, FollowsTheStateFormat) {
  const SplitInput bf16 = split_input({.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2}, 5, false);
  const SplitInput defaults;
  EXPECT_EQ(bf16.numel, 5);
  EXPECT_DOUBLE_EQ(bf16.state_nbytes, defaults.state_nbytes);
  EXPECT_DOUBLE_EQ(bf16.gradient_nbytes, defaults.gradient_nbytes);
  EXPECT_DOUBLE_EQ(bf16.param_nbytes, defaults.param_nbytes);
  EXPECT_DOUBLE_EQ(bf16.host_dram_nbytes, defaults.host_dram_nbytes);
  EXPECT_DOUBLE_EQ(bf16.streamed_dram_nbytes, defaults.streamed_dram_nbytes);
  EXPECT_DOUBLE_EQ(bf16.update_nbytes, defaults.update_nbytes);
  EXPECT_DOUBLE_EQ(split_input({.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2}, 5, true).host_dram_nbytes, 34);
  const SplitInput fp16 = split_input({.param_nbytes = 2, .rest_nbytes = 4, .num_states = 2}, 5, false);
  EXPECT_DOUBLE_EQ(fp16.state_nbytes, 12);
  EXPECT_DOUBLE_EQ(fp16.update_nbytes, 28);
  const SplitInput fp32 = split_input({.param_nbytes = 4, .rest_nbytes = 0, .num_states = 2}, 5, false);
  EXPECT_DOUBLE_EQ(fp32.state_nbytes, 8);
  EXPECT_DOUBLE_EQ(fp32.update_nbytes, 28);
  EXPECT_DOUBLE_EQ(fp32.host_dram_nbytes, 36);
}

TEST(SplitInput, ParametersThatRestOnTheHostTravelWithTheirStates) {
  const SplitInput input = split_input({.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2}, 5, false, true);
  EXPECT_DOUBLE_EQ(input.state_nbytes, 12);
  EXPECT_DOUBLE_EQ(input.streamed_dram_nbytes, 24);
  EXPECT_DOUBLE_EQ(input.param_nbytes, 0);
  EXPECT_DOUBLE_EQ(input.gather_nbytes, 2);
}

TEST(EvaluateSplit, GathersTakeTheirPartOfTheWayUp) {
  SplitInput input{.numel = 1'000'000'000, .state_nbytes = 10, .param_nbytes = 0, .gather_nbytes = 5};
  input.observation = {.forward_s = 1.0, .backward_s = 1.0};
  input.rates.up = 10e9;
  EXPECT_NEAR(evaluate_split(input, 0.5).exposed_s, 0.0, 1e-9);
  EXPECT_NEAR(evaluate_split(input, 1.0).exposed_s, 0.5, 1e-9);
  input.gather_nbytes = 0;
  EXPECT_NEAR(evaluate_split(input, 1.0).exposed_s, 0.0, 1e-9);
}

TEST(PredictCompute, CountsTheFloatingPointOperations) {
  const StepObservation plain = predict_compute(1'000'000'000, 1000, 1e12, false);
  EXPECT_DOUBLE_EQ(*plain.forward_s, 2.0);
  EXPECT_DOUBLE_EQ(*plain.backward_s, 4.0);
  EXPECT_DOUBLE_EQ(*predict_compute(1'000'000'000, 1000, 1e12, true).backward_s, 6.0);
  EXPECT_FALSE(predict_compute(1'000'000'000, 1000, 0, true).forward_s);
  EXPECT_FALSE(predict_compute(1'000'000'000, 0, 1e12, true).forward_s);
}

}  // namespace
}  // namespace pannier
