#include "pannier/optim/update_rate.h"

#include <gtest/gtest.h>

namespace pannier {
namespace {

TEST(MeasureUpdateRate, IsARate) {
  const double rate = measure_update_rate(serial_for, {.most_seconds = 0.05, .numel = 1 << 16});
  EXPECT_GT(rate, 1e6);
  EXPECT_LT(rate, 1e12);
}

TEST(MeasureUpdateRate, IsNothingForNothing) {
  EXPECT_DOUBLE_EQ(measure_update_rate(serial_for, {.most_seconds = 0.05, .numel = 0}), 0.0);
}

}  // namespace
}  // namespace pannier
