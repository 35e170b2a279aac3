#include "pannier/plan/rate_correction.h"

#include <gtest/gtest.h>

#include <limits>

namespace pannier {
namespace {

TEST(Correct, MovesAQuarterOfTheWay) {
  EXPECT_DOUBLE_EQ(correct({.up = 100}, {.up = {.amount = 60, .seconds = 1}}).up, 90);
  EXPECT_DOUBLE_EQ(correct({.dram = 100}, {.dram = {.amount = 400, .seconds = 2}}).dram, 125);
}

TEST(Correct, OneOddStepMovesItLittle) {
  EXPECT_DOUBLE_EQ(correct({.down = 100}, {.down = {.amount = 1e12, .seconds = 1}}).down, 175);
  EXPECT_DOUBLE_EQ(correct({.down = 100}, {.down = {.amount = 1, .seconds = 1e6}}).down, 81.25);
}

TEST(Correct, FollowsALastingChange) {
  LinkAndHostRates rates{.host_update = 8e9};
  for (int i = 0; i < 20; ++i) {
    rates = correct(rates, {.host_update = {.amount = 5e8, .seconds = 0.5}});
  }
  EXPECT_NEAR(rates.host_update, 1e9, 0.05e9);
}

TEST(Correct, IgnoresWhatWasNotSeen) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const LinkAndHostRates rates{.up = 1, .down = 2, .up_both = 3, .down_both = 4, .dram = 5, .host_update = 6};
  const LinkAndHostRates same = correct(rates, {.up = {.amount = 0, .seconds = 1},
                                                .down = {.amount = 1, .seconds = 0},
                                                .up_both = {.amount = -1, .seconds = 1},
                                                .down_both = {.amount = 1, .seconds = -1},
                                                .dram = {.amount = nan, .seconds = 1},
                                                .host_update = {.amount = 1e308, .seconds = 1e-308}});
  EXPECT_DOUBLE_EQ(same.up, 1);
  EXPECT_DOUBLE_EQ(same.down, 2);
  EXPECT_DOUBLE_EQ(same.up_both, 3);
  EXPECT_DOUBLE_EQ(same.down_both, 4);
  EXPECT_DOUBLE_EQ(same.dram, 5);
  EXPECT_DOUBLE_EQ(same.host_update, 6);
}

TEST(Correct, TakesAnUnknownRateAsSeen) {
  EXPECT_DOUBLE_EQ(correct({}, {.device_copy = {.amount = 30, .seconds = 2}}).device_copy, 15);
}

}  // namespace
}  // namespace pannier
