#include "pannier/plan/nearest_fit.h"

#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr std::int64_t kNumel = 1 << 20;
constexpr std::size_t kActivations = 8 << 20;

// bf16: 2 MiB of parameters, 2 of gradients, 10 of states; 8 of activations for 8 samples.
MemoryPlanInput input_at(Home home, bool accumulates = false) {
  return {.bucket_numels = {kNumel},
          .parameter_numel = kNumel,
          .shape = {.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2},
          .optimizer_home = home,
          .accumulates = accumulates,
          .activations_nbytes = kActivations,
          .micro_batch_size = 8};
}

std::size_t mib(std::size_t count) { return count << 20; }

TEST(FindNearestFit, ChangesNothingThatFits) {
  const NearestFit nearest = find_nearest_fit(input_at(Home::kDevice), {.device_nbytes = mib(22)});
  EXPECT_TRUE(nearest.fits);
  EXPECT_TRUE(nearest.changes.empty());
}

TEST(FindNearestFit, MovesTheStatesFirst) {
  const NearestFit to_host = find_nearest_fit(input_at(Home::kDevice), {.device_nbytes = mib(12)});
  EXPECT_THAT(to_host.changes, testing::ElementsAre("zero_optimization.offload_optimizer.device \"cpu\""));
  const NearestFit to_device = find_nearest_fit(input_at(Home::kHost), {.device_nbytes = mib(22), .host_nbytes = 1});
  EXPECT_THAT(to_device.changes, testing::ElementsAre("zero_optimization.offload_optimizer.device \"none\""));
}

TEST(FindNearestFit, ThenShrinksTheMicroBatchAsLittleAsItMust) {
  const NearestFit smaller = find_nearest_fit(input_at(Home::kHost), {.device_nbytes = mib(9)});
  EXPECT_THAT(smaller.changes, testing::ElementsAre("train_micro_batch_size_per_gpu 5"));
  EXPECT_TRUE(smaller.input.accumulates);
  EXPECT_EQ(plan_memory(smaller.input).device(), mib(9));
  // With the states on the device the sum over micro-batches takes memory there, so the home changes too.
  const NearestFit both = find_nearest_fit(input_at(Home::kDevice), {.device_nbytes = mib(9)});
  EXPECT_THAT(both.changes, testing::ElementsAre("zero_optimization.offload_optimizer.device \"cpu\"",
                                                 "train_micro_batch_size_per_gpu 5"));
}

TEST(FindNearestFit, GivesUpAccumulationLast) {
  MemoryPlanInput input = input_at(Home::kHost, true);
  const std::size_t host = plan_memory(input).host();
  const NearestFit nearest = find_nearest_fit(input, {.device_nbytes = mib(12), .host_nbytes = host - 1});
  EXPECT_THAT(nearest.changes, testing::ElementsAre("gradient_accumulation_steps 1"));
  EXPECT_FALSE(nearest.input.accumulates);
}

TEST(FindNearestFit, SaysTheLeastWhereNothingFits) {
  const NearestFit nearest = find_nearest_fit(input_at(Home::kDevice, true), {.device_nbytes = mib(3)});
  EXPECT_FALSE(nearest.fits);
  EXPECT_EQ(plan_memory(nearest.input).device(), mib(5));
  EXPECT_THAT(describe(nearest), testing::StartsWith("the least that can train this model is 5.00 MiB of device"));
}

TEST(FindNearestFit, NeverNamesWhatDoesNotFit) {
  for (const Home home : {Home::kDevice, Home::kHost}) {
    for (const bool accumulates : {false, true}) {
      for (std::size_t device = 1; device <= 30; ++device) {
        for (std::size_t host = 1; host <= 18; ++host) {
          const MemoryBudget budget{.device_nbytes = mib(device), .host_nbytes = mib(host)};
          const NearestFit nearest = find_nearest_fit(input_at(home, accumulates), budget);
          EXPECT_EQ(nearest.fits, fits(plan_memory(nearest.input), budget)) << device << " " << host;
        }
      }
    }
  }
}

TEST(RequireFit, CountsActivationsThatAreKnown) {
  try {
    require_fit(input_at(Home::kHost), {.device_nbytes = mib(9)});
    FAIL() << "a plan above its budget passed";
  } catch (const OutOfMemoryError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("needs 12.00 MiB of device memory (2.00 MiB parameters"));
    EXPECT_THAT(error.what(), testing::HasSubstr("8.00 MiB activations"));
    EXPECT_THAT(error.what(),
                testing::HasSubstr("Nearest that fits: train_micro_batch_size_per_gpu 5 would need 9.00"));
  }
}

TEST(PlanMemory, CountsEachBucketWhereItRests) {
  MemoryPlanInput input = input_at(Home::kHost, true);
  input.bucket_numels = {4096, 8192, 12288};
  input.parameter_numel = 24000;
  input.activations_nbytes = 0;
  input.routes = {UpdateRoute::kHost, UpdateRoute::kStreamed, UpdateRoute::kDevice};
  const MemoryPlan plan = plan_memory(input);
  EXPECT_EQ(plan.device_optimizer_states, 12288U * 10);
  EXPECT_EQ(plan.device_gradients, 24000U * 2 + 12288U * 4);
  EXPECT_EQ(plan.host_optimizer_states, 12288U * 12);
  EXPECT_EQ(plan.host_gradients, 12288U * 4);
  input.routes.pop_back();
  EXPECT_THROW((void)plan_memory(input), InternalError);
}

}  // namespace
}  // namespace pannier
