#include "pannier/optim/schedule.h"

#include <gmock/gmock.h>

#include <functional>
#include <string>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

constexpr double kTolerance = 1e-15;

// The lr of group `group` at each optimizer step, from the first on.
std::vector<double> lrs_used(Schedule schedule, std::size_t num_steps, std::size_t group = 0) {
  std::vector<double> used;
  for (std::size_t step = 0; step < num_steps; ++step) {
    used.push_back(schedule.lrs().at(group));
    schedule.step();
  }
  return used;
}

std::vector<double> momenta_used(Schedule schedule, std::size_t num_steps) {
  std::vector<double> used;
  for (std::size_t step = 0; step < num_steps; ++step) {
    used.push_back(schedule.momenta().at(0).first);
    schedule.step();
  }
  return used;
}

void expect_lrs(const std::vector<double>& used, const std::vector<double>& wanted) {
  EXPECT_THAT(used, Pointwise(DoubleNear(kTolerance), wanted));
}

void expect_refused(ScheduleType type, const ScheduleOptions& options, const std::string& message) {
  try {
    const Schedule schedule(type, options, {0.1, 0.2, 0.3});
    ADD_FAILURE() << "accepted; wanted: " << message;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

TEST(WarmupLr, WarmsEachGroupUpToItsOwnLr) {
  const Schedule schedule(ScheduleType::kWarmupLr, {.warmup_num_steps = 2, .warmup_type = WarmupCurve::kLinear},
                          {0.1, 7.0, 0.2});
  expect_lrs(lrs_used(schedule, 6, 0), {0, 0, 0.05, 0.1, 0.1, 0.1});
  expect_lrs(lrs_used(schedule, 6, 2), {0, 0, 0.1, 0.2, 0.2, 0.2});
  EXPECT_EQ(schedule.lrs().size(), 3U);
}

TEST(WarmupLr, ClimbsOnALogarithmByDefault) {
  const Schedule schedule(ScheduleType::kWarmupLr, {.warmup_min_lr = 0.01, .warmup_num_steps = 4}, {0.1});
  expect_lrs(lrs_used(schedule, 7), {0.01, 0.01, 0.055, 0.08132331253245204, 0.1, 0.1, 0.1});
}

TEST(WarmupLr, OneStepCountsAsTwo) {
  expect_lrs(lrs_used({ScheduleType::kWarmupLr, {.warmup_num_steps = 1}, {0.1}}, 4), {0, 0, 0.1, 0.1});
}

TEST(WarmupLr, ZeroStepsMeansNoWarmup) {
  expect_lrs(lrs_used({ScheduleType::kWarmupLr, {.warmup_num_steps = 0}, {0.1}}, 3), {0.1, 0.1, 0.1});
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, {.warmup_num_steps = 0, .total_num_steps = 4}, {0.1}}, 6),
             {0.1, 0.1, 0.075, 0.05, 0.025, 0});
  expect_lrs(lrs_used({ScheduleType::kWarmupCosineLr, {.warmup_num_steps = 0, .total_num_steps = 2}, {0.1}}, 3),
             {0.1, 0.050005, 0.00001});
}

TEST(WarmupLr, TakesOneMaximumAGroup) {
  const ScheduleOptions options{.warmup_min_lr = PerGroup(std::vector<double>{0, 0.1}),
                                .warmup_max_lr = PerGroup(std::vector<double>{1, 2}),
                                .warmup_num_steps = 2,
                                .warmup_type = WarmupCurve::kLinear};
  Schedule schedule(ScheduleType::kWarmupLr, options, {0.5, 0.5});
  schedule.step_to(1);
  EXPECT_THAT(schedule.lrs(), ElementsAre(DoubleNear(0.5, kTolerance), DoubleNear(1.05, kTolerance)));
}

TEST(WarmupDecayLr, WarmsUpAndDecaysToZero) {
  const ScheduleOptions linear{
      .warmup_max_lr = 0.1, .warmup_num_steps = 2, .warmup_type = WarmupCurve::kLinear, .total_num_steps = 6};
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, linear, {0.3}}, 9), {0, 0, 0.05, 0.1, 0.075, 0.05, 0.025, 0, 0});
  const ScheduleOptions log{.warmup_max_lr = 0.1, .warmup_num_steps = 4, .total_num_steps = 6};
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, log, {0.3}}, 9),
             {0, 0, 0.05, 0.07924812503605783, 0.1, 0.1, 0.05, 0, 0});
}

TEST(WarmupDecayLr, DecaysFromTheGroupsOwnLr) {
  const ScheduleOptions options{.warmup_num_steps = 2, .warmup_type = WarmupCurve::kLinear, .total_num_steps = 6};
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, options, {0.3}}, 5), {0, 0, 0.15, 0.3, 0.225});
}

TEST(WarmupDecayLr, EndsInsideTheWarmup) {
  const ScheduleOptions options{
      .warmup_max_lr = 0.1, .warmup_num_steps = 4, .warmup_type = WarmupCurve::kLinear, .total_num_steps = 2};
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, options, {0.3}}, 7), {0, 0, 0.025, 0.05, 0.075, 0, 0});
}

TEST(WarmupCosineLr, FollowsTheCosineOfEachGroupsLr) {
  const ScheduleOptions options{.warmup_num_steps = 2,
                                .warmup_type = WarmupCurve::kLinear,
                                .total_num_steps = 6,
                                .warmup_min_ratio = 0.1,
                                .cos_min_ratio = 0.01};
  const Schedule schedule(ScheduleType::kWarmupCosineLr, options, {0.1, 0.4});
  expect_lrs(lrs_used(schedule, 9, 0),
             {0, 0.01, 0.055, 0.0855017856687341, 0.0505, 0.015498214331265903, 0.001, 0.001, 0.001});
  expect_lrs(lrs_used(schedule, 9, 1),
             {0, 0.04, 0.22, 0.3420071426749364, 0.202, 0.06199285732506361, 0.004, 0.004, 0.004});
  expect_lrs(lrs_used({ScheduleType::kWarmupCosineLr, {.warmup_num_steps = 3, .total_num_steps = 5}, {0.1}}, 7),
             {0, 0, 0.06309297535714574, 0.1, 0.050005, 1e-05, 1e-05});
}

TEST(OneCycle, CyclesAndDecays) {
  const ScheduleOptions options{.cycle_min_lr = 0.1,
                                .cycle_max_lr = 0.5,
                                .decay_lr_rate = 0.5,
                                .cycle_first_step_size = 3,
                                .cycle_second_step_size = 5,
                                .decay_step_size = 2,
                                .decay_mom_rate = 0.1};
  const Schedule schedule(ScheduleType::kOneCycle, options, {0.3});
  expect_lrs(lrs_used(schedule, 13), {0.1, 0.23333333333333334, 0.3666666666666667, 0.5, 0.42, 0.34, 0.26, 0.18, 0.1,
                                      0.08, 0.06666666666666667, 0.05714285714285715, 0.05});
  expect_lrs(momenta_used(schedule, 13),
             {0.8, 0.8666666666666667, 0.8333333333333334, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.945, 0.99, 1.035, 1.08});
  EXPECT_EQ(schedule.momenta().at(0).second, 0.99);
  // What the curve shows differs before the first step alone.
  EXPECT_EQ(schedule.cycle_momenta().at(0), std::pair(0.9, 0.99));
  Schedule later = schedule;
  later.step();
  EXPECT_EQ(later.cycle_momenta(), later.momenta());
}

TEST(OneCycle, IsSymmetricWithoutASecondSize) {
  const ScheduleOptions options{.cycle_min_lr = 0.1, .cycle_max_lr = 0.5, .cycle_first_step_size = 4};
  expect_lrs(lrs_used({ScheduleType::kOneCycle, options, {0.3}}, 10),
             {0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1});
}

TEST(OneCycle, MovesInStairs) {
  const ScheduleOptions options{.cycle_min_lr = 0.0,
                                .cycle_max_lr = 1.0,
                                .cycle_first_step_size = 6,
                                .cycle_second_step_size = 4,
                                .cycle_first_stair_count = 3,
                                .cycle_second_stair_count = 2};
  expect_lrs(lrs_used({ScheduleType::kOneCycle, options, {0.3}}, 11),
             {0, 0, 1. / 3, 1. / 3, 2. / 3, 2. / 3, 1, 0.5, 0.5, 0, 0});
}

TEST(OneCycle, MayHaveNoWayDownAndNoMomentum) {
  const ScheduleOptions options{.cycle_min_lr = 0.0,
                                .cycle_max_lr = 1.0,
                                .cycle_first_step_size = 3,
                                .cycle_second_step_size = 0,
                                .cycle_momentum = false};
  const Schedule schedule(ScheduleType::kOneCycle, options, {0.3});
  expect_lrs(lrs_used(schedule, 6), {0, 1. / 3, 2. / 3, 0, 0, 0});
  EXPECT_TRUE(schedule.momenta().empty());
}

TEST(LrRangeTest, RisesWithoutEnd) {
  const ScheduleOptions smooth{
      .lr_range_test_min_lr = 0.01, .lr_range_test_step_size = 2, .lr_range_test_step_rate = 0.5};
  expect_lrs(lrs_used({ScheduleType::kLrRangeTest, smooth, {0.3}}, 6), {0.01, 0.0125, 0.015, 0.0175, 0.02, 0.0225});
  ScheduleOptions stairs = smooth;
  stairs.lr_range_test_staircase = true;
  expect_lrs(lrs_used({ScheduleType::kLrRangeTest, stairs, {0.3}}, 6), {0.01, 0.01, 0.015, 0.015, 0.02, 0.02});
}

TEST(Schedule, ResumesAsIfItHadNeverStopped) {
  const ScheduleOptions options{.warmup_num_steps = 2, .warmup_type = WarmupCurve::kLinear, .total_num_steps = 6};
  Schedule first(ScheduleType::kWarmupDecayLr, options, {0.1});
  for (int step = 0; step < 3; ++step) {
    first.step();
  }
  Schedule second(ScheduleType::kWarmupDecayLr, options, {0.1});
  second.step_to(first.last_iteration());
  expect_lrs(lrs_used(second, 3), {0.1, 0.075, 0.05});
  ScheduleOptions started = options;
  started.last_batch_iteration = 2;
  expect_lrs(lrs_used({ScheduleType::kWarmupDecayLr, started, {0.1}}, 3), {0.1, 0.075, 0.05});
}

TEST(Schedule, NamesBothLengthsOfAWrongList) {
  const PerGroup two(std::vector<double>{0.1, 0.2});
  const char* lengths = "is a list of 2 values, but there are 3 parameter groups";
  expect_refused(ScheduleType::kWarmupLr, {.warmup_min_lr = two}, std::string("warmup_min_lr ") + lengths);
  expect_refused(ScheduleType::kWarmupLr, {.warmup_max_lr = two}, std::string("warmup_max_lr ") + lengths);
  expect_refused(ScheduleType::kOneCycle, {.cycle_min_lr = 0.1, .cycle_max_lr = two}, lengths);
  expect_refused(ScheduleType::kOneCycle, {.cycle_min_lr = 0.1, .cycle_max_lr = 0.2, .cycle_min_mom = two}, lengths);
  expect_refused(ScheduleType::kLrRangeTest, {.lr_range_test_min_lr = two}, lengths);
  expect_refused(ScheduleType::kWarmupLr, {.warmup_max_lr = std::vector<double>{0.1}}, "a list of 1 values");
  expect_refused(ScheduleType::kWarmupLr, {.warmup_max_lr = std::vector<double>{}}, "a list of 0 values");
}

TEST(Schedule, RefusesValuesOutOfRange) {
  expect_refused(ScheduleType::kWarmupLr, {.warmup_num_steps = -1}, "warmup_num_steps");
  expect_refused(ScheduleType::kWarmupLr, {.warmup_min_lr = -0.1}, "warmup_min_lr");
  expect_refused(ScheduleType::kWarmupDecayLr, {}, "total_num_steps must be given and positive");
  expect_refused(ScheduleType::kWarmupCosineLr, {.total_num_steps = 5, .cos_min_ratio = 1.5}, "cos_min_ratio");
  expect_refused(ScheduleType::kWarmupCosineLr, {.total_num_steps = 5, .warmup_min_ratio = -1}, "warmup_min_ratio");
  expect_refused(ScheduleType::kOneCycle, {.cycle_max_lr = 0.1}, "both cycle_min_lr and cycle_max_lr");
  const ScheduleOptions cycle{.cycle_min_lr = 0.1, .cycle_max_lr = 0.2};
  const auto with = [&cycle](const std::function<void(ScheduleOptions&)>& change) {
    ScheduleOptions changed = cycle;
    change(changed);
    return changed;
  };
  const auto refuse_cycle = [&with](const char* field, const std::function<void(ScheduleOptions&)>& change) {
    expect_refused(ScheduleType::kOneCycle, with(change), field);
  };
  refuse_cycle("cycle_first_step_size", [](ScheduleOptions& o) { o.cycle_first_step_size = 0; });
  refuse_cycle("cycle_second_step_size", [](ScheduleOptions& o) { o.cycle_second_step_size = -1; });
  refuse_cycle("cycle_first_stair_count", [](ScheduleOptions& o) { o.cycle_first_stair_count = -1; });
  refuse_cycle("cycle_second_stair_count", [](ScheduleOptions& o) { o.cycle_second_stair_count = -1; });
  refuse_cycle("decay_step_size", [](ScheduleOptions& o) { o.decay_step_size = -1; });
  refuse_cycle("decay_lr_rate", [](ScheduleOptions& o) { o.decay_lr_rate = -1; });
  expect_refused(ScheduleType::kLrRangeTest, {.lr_range_test_step_size = 0}, "lr_range_test_step_size");
  expect_refused(ScheduleType::kLrRangeTest, {.lr_range_test_step_rate = -1}, "lr_range_test_step_rate");
  expect_refused(ScheduleType::kWarmupLr, {.last_batch_iteration = -2}, "-1 or more");
}

TEST(Schedule, HasNoGroupsIsNoError) { EXPECT_TRUE(Schedule(ScheduleType::kWarmupLr, {}, {}).lrs().empty()); }

TEST(ScheduleType, HasANameThatReadsBack) {
  for (const char* name : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}) {
    EXPECT_STREQ(to_string(schedule_type(name)), name);
  }
  try {
    (void)schedule_type("StepLR");
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest"));
  }
}

}  // namespace
}  // namespace pannier
