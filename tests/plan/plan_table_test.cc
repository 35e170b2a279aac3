#include "pannier/plan/plan_table.h"

#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

PlanTable large_table() {
  const SplitInput input{.numel = 1'540'000'000,
                         .observation = {.forward_s = 0.138, .backward_s = 0.360},
                         .rates = {.up = 55e9, .down = 55e9, .host_update = 4.5e9}};
  PlanTable table{.memory = {.device_parameters = std::size_t{3} << 30, .host_optimizer_states = std::size_t{18} << 30},
                  .optimizer_home = Home::kHost,
                  .bucket_numels = std::vector<std::int64_t>(100, 15'400'000),
                  .split = solve_split(input),
                  .observation = input.observation,
                  .rates = input.rates,
                  .origins = {.link = RateOrigin::kGiven, .host_update = RateOrigin::kProbe}};
  table.routes = assign_routes(table.bucket_numels, {.host = table.split->host_share});
  return table;
}

TEST(FormatPlanTable, SaysMemoryPathsTimesAndRates) {
  const std::string text = format_plan_table(large_table());
  for (const char* line :
       {"parameters             3.00 GiB          0 B", "activations: measured after step 1",
        "streamed                   77       1.19 G   77.0 %", "host                       23     354.20 M   23.0 %",
        "forward                 0.138 s", "backward                0.360 s", "exposed                 0.078 s",
        "step                    0.576 s", "binds                 link down",
        "link up                 55.0 GB/s  given", "update on host            4.5 G/s  probe",
        "DRAM                            -  not known"}) {
    EXPECT_THAT(text, testing::HasSubstr(line));
  }
}

TEST(FormatPlanTable, SaysWhenTimesAreNotKnown) {
  PlanTable table = large_table();
  table.observation = {};
  EXPECT_THAT(format_plan_table(table), testing::HasSubstr("times come after the first steps"));
}

TEST(FormatPlanTable, LeavesOutWhatStatesOnTheDeviceDoNotNeed) {
  PlanTable table = large_table();
  table.optimizer_home = Home::kDevice;
  table.memory.host_optimizer_states = 0;
  table.split.reset();
  table.routes.clear();
  const std::string text = format_plan_table(table);
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("hardware")));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("binds")));
  EXPECT_THAT(text, testing::HasSubstr("step                    0.498 s"));
}

TEST(FormatPlanTable, CountsEachMicroBatchAndMeasuredActivations) {
  PlanTable table = large_table();
  table.micro_batches = 2;
  table.activations_nbytes = std::size_t{5} << 30;
  const std::string text = format_plan_table(table);
  EXPECT_THAT(text, testing::HasSubstr("forward (each of 2)"));
  EXPECT_THAT(text, testing::HasSubstr("step                    1.074 s"));
  EXPECT_THAT(text, testing::HasSubstr("activations: peak 5.00 GiB, measured"));
}

TEST(FormatRoutes, ChecksItsInput) {
  PlanTable table = large_table();
  table.routes.pop_back();
  EXPECT_THROW((void)format_routes(table), InternalError);
}

}  // namespace
}  // namespace pannier
