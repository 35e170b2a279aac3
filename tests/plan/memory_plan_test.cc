#include "pannier/plan/memory_plan.h"

#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

MemoryPlanInput bf16_input(Home home, bool accumulates = false) {
  return {.bucket_numels = {4096, 8192},
          .parameter_numel = 12200,
          .shape = {.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2},
          .optimizer_home = home,
          .accumulates = accumulates,
          .unmanaged_nbytes = 100};
}

TEST(PlanMemory, Bf16OnTheDevice) {
  const MemoryPlan plan = plan_memory(bf16_input(Home::kDevice));
  EXPECT_EQ(plan.device_parameters, 12288U * 2 + 100);
  EXPECT_EQ(plan.device_optimizer_states, 12288U * 10);
  EXPECT_EQ(plan.device_gradients, 12200U * 2);
  EXPECT_EQ(plan.host(), 0U);
}

TEST(PlanMemory, Bf16OnTheHostTakesTwelveBytesAndTwoOfGradient) {
  const MemoryPlan plan = plan_memory(bf16_input(Home::kHost));
  EXPECT_EQ(plan.device_optimizer_states, 0U);
  EXPECT_EQ(plan.host_optimizer_states, 12288U * 12);
  EXPECT_EQ(plan.host_gradients, 12288U * 2);
}

TEST(PlanMemory, AccumulationAddsAnFp32SumWhereTheStatesAre) {
  EXPECT_EQ(plan_memory(bf16_input(Home::kDevice, true)).device_gradients, 12200U * 6);
  EXPECT_EQ(plan_memory(bf16_input(Home::kHost, true)).device_gradients, 12200U * 2);
  EXPECT_EQ(plan_memory(bf16_input(Home::kHost, true)).host_gradients, 12288U * 4);
}

TEST(PlanMemory, Fp16AndFp32FollowTheTable) {
  MemoryPlanInput input = bf16_input(Home::kHost);
  input.shape = {.param_nbytes = 2, .rest_nbytes = 4, .num_states = 2};
  EXPECT_EQ(plan_memory(input).host_optimizer_states, 12288U * 14);
  input.shape = {.param_nbytes = 4, .rest_nbytes = 0, .num_states = 2};
  EXPECT_EQ(plan_memory(input).host_optimizer_states, 12288U * 12);
}

TEST(PlanMemory, SetsLargeArraysApart) {
  MemoryPlanInput input = bf16_input(Home::kHost);
  input.bucket_numels = {std::int64_t{1} << 20};
  EXPECT_EQ(plan_memory(input).host_optimizer_states, (std::size_t{12} << 20) + 4 * 8192);
}

TEST(HostBucketLayout, ArraysNeverOverlapAndStayAligned) {
  for (const std::int64_t numel : {0, 64, 4096, 1 << 20, 3 << 20}) {
    const HostBucketLayout layout = host_bucket_layout({.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2}, numel);
    const std::array<std::size_t, 4> widths{4, 4, 2, 2};
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(layout.offsets[i] % 64, 0U);
      EXPECT_LE(layout.offsets[i] + nbytes_of(numel, widths[i]), i < 3 ? layout.offsets[i + 1] : layout.nbytes);
    }
  }
}

TEST(RequireFit, NamesWhatWouldFit) {
  try {
    require_fit(bf16_input(Home::kDevice), {.device_nbytes = 12288 * 5});
    FAIL() << "a plan above its budget passed";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(" out of memory. "));
    EXPECT_THAT(error.what(), testing::HasSubstr("offload_optimizer.device \"cpu\" would need"));
  }
}

TEST(RequireFit, SaysTheLeastWhenNothingFits) {
  try {
    require_fit(bf16_input(Home::kHost), {.host_nbytes = 1000});
    FAIL() << "a plan above its budget passed";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("Host out of memory. "));
  }
  EXPECT_THROW(require_fit(bf16_input(Home::kDevice), {.device_nbytes = 1000}), OutOfMemoryError);
}

TEST(RequireFit, AcceptsWhatFitsAndNoBudget) {
  EXPECT_NO_THROW(require_fit(bf16_input(Home::kDevice), {}));
  EXPECT_NO_THROW(require_fit(bf16_input(Home::kHost), {.device_nbytes = 1 << 20, .host_nbytes = 1 << 20}));
}

TEST(FormatPlan, NamesEveryOwner) {
  const std::string text = format_plan(plan_memory(bf16_input(Home::kHost)), Home::kHost);
  EXPECT_THAT(text, testing::HasSubstr("optimizer states"));
  EXPECT_THAT(text, testing::HasSubstr("measured after step 1"));
}

TEST(PlanMemory, OfOneRankOfMany) {
  MemoryPlanInput input;
  input.bucket_numels = {8192, 4096};
  input.shard_numels = {4096, 0};
  input.parameter_numel = 12000;
  input.shape = {.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};
  input.world_size = 2;
  const MemoryPlan plan = plan_memory(input);
  EXPECT_EQ(plan.device_parameters, 2U * 12288);
  EXPECT_EQ(plan.device_optimizer_states, 10U * 4096);
  // All of a micro-batch, the shard's fp32 sum, and two of the largest bucket under way, packed and received.
  EXPECT_EQ(plan.device_gradients, 2U * 12000 + 4U * 4096 + 4U * 2 * 8192);
  input.sums_on_each_rank = true;
  input.accumulates = true;
  EXPECT_EQ(plan_memory(input).device_gradients, 2U * 12000 + 4U * 4096 + 4U * 4 * 8192 + 4U * 12000);
  input.optimizer_home = Home::kHost;
  EXPECT_EQ(plan_memory(input).host_optimizer_states, 12U * 4096);
  EXPECT_EQ(plan_memory(input).host_gradients, 4U * 4096);
}

}  // namespace
}  // namespace pannier
