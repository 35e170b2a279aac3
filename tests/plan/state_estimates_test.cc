#include "pannier/plan/state_estimates.h"

#include <gtest/gtest.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr double kGib = 1024.0 * 1024.0 * 1024.0;

TEST(StateEstimates, Stage2MatchesKnownNumbers) {
  for (const auto& [gpus, host] : {std::pair{1, 63.72}, {2, 63.72}, {8, 127.45}}) {
    const auto estimate = estimate_stage_2({.numel = 2'851'000'000, .gpus_per_node = gpus});
    EXPECT_NEAR(estimate.device_bytes / kGib, 5.31, 0.005);
    EXPECT_NEAR(estimate.host_bytes / kGib, host, 0.005) << gpus;
  }
}

TEST(StateEstimates, Stage3DividesOverRanks) {
  StateEstimateInput input{.numel = 1'000'000, .largest_layer_numel = 1000, .gpus_per_node = 2, .nodes = 2};
  EXPECT_EQ(estimate_stage_3(input).device_bytes, 4000 + 500'000);
  EXPECT_EQ(estimate_stage_3(input).host_bytes, 1e6 * 8 * 1.5);
  input.offloads_parameters = true;
  EXPECT_EQ(estimate_stage_3(input).device_bytes, 4000);
  EXPECT_EQ(estimate_stage_3(input).host_bytes, 1e6 * 9 * 1.5);
  input.offloads_optimizer = false;
  EXPECT_EQ(estimate_stage_3(input).device_bytes, 4000 + 4'500'000);
}

TEST(StateEstimates, RefusesWhatCannotBe) {
  EXPECT_THROW(static_cast<void>(estimate_stage_2({.numel = 1, .gpus_per_node = 0})), ConfigError);
  EXPECT_THROW(static_cast<void>(estimate_stage_3({.numel = -1})), ConfigError);
  EXPECT_THROW(static_cast<void>(estimate_stage_2({.numel = 1, .buffer_factor = 0})), ConfigError);
}

}  // namespace
}  // namespace pannier
