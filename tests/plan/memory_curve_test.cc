#include "pannier/plan/memory_curve.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace pannier {
namespace {

// Ticks 0 to 3; what is given is the peak that ends before each tick, and that of the last interval.
void run_step(MemoryCurve& curve, const std::vector<std::size_t>& peaks) {
  for (std::size_t i = 0; i + 1 < peaks.size(); ++i) {
    curve.tick(static_cast<std::int64_t>(i), peaks[i]);
  }
  curve.end_step(peaks.back());
}

TEST(MemoryCurve, SaysWhatTheLastStepTook) {
  MemoryCurve curve;
  EXPECT_FALSE(curve.is_known());
  run_step(curve, {10, 20, 90, 40, 30});
  EXPECT_TRUE(curve.is_known());
  EXPECT_EQ(curve.overall(), 90U);
  curve.tick(0, 10);
  EXPECT_EQ(curve.until_next_tick(), 20U);
  EXPECT_EQ(curve.until_end(), 90U);
  curve.tick(1, 20);
  curve.tick(2, 90);
  EXPECT_EQ(curve.until_next_tick(), 40U);
  EXPECT_EQ(curve.until_end(), 40U);
  curve.tick(3, 40);
  EXPECT_EQ(curve.until_end(), 30U);
}

TEST(MemoryCurve, SaysWhereThePeakIs) {
  MemoryCurve curve;
  curve.tick(0, 0);
  EXPECT_FALSE(curve.peaks_until_next_tick());  // Nothing is known yet.
  curve.tick(1, 20);
  curve.tick(2, 90);
  curve.tick(3, 40);
  curve.end_step(30);
  for (const auto& [key, before, peaks] :
       {std::tuple(0, 10U, false), std::tuple(1, 20U, true), std::tuple(2, 90U, false), std::tuple(3, 40U, false)}) {
    curve.tick(key, before);
    EXPECT_EQ(curve.peaks_until_next_tick(), peaks) << key;
  }
}

TEST(MemoryCurve, StaysSmallThroughALongEvaluation) {
  MemoryCurve curve;
  constexpr int kManyTicks = 200'000;
  for (int i = 0; i < kManyTicks; ++i) {
    curve.tick(i, 100);
  }
  curve.end_step(300);
  EXPECT_EQ(curve.overall(), 300U);
  curve.tick(0, 100);
  EXPECT_EQ(curve.until_end(), 300U);
}

TEST(MemoryCurve, ExpectsTheMostOfAStepUnlikeTheLast) {
  MemoryCurve curve;
  run_step(curve, {10, 20, 90, 40, 30});
  curve.tick(0, 10);
  curve.tick(7, 20);
  EXPECT_EQ(curve.until_next_tick(), 90U);
  EXPECT_EQ(curve.until_end(), 90U);
  curve.tick(2, 120);
  EXPECT_EQ(curve.until_end(), 120U);
  curve.end_step(5);
  EXPECT_EQ(curve.overall(), 120U);
}

TEST(MemoryCurve, TicksBeyondTheLastStepAreUnlikeIt) {
  MemoryCurve curve;
  run_step(curve, {10, 20, 30});
  curve.tick(0, 10);
  curve.tick(1, 20);
  curve.tick(2, 25);
  EXPECT_EQ(curve.until_next_tick(), 30U);
}

TEST(MemoryCurve, AnIntervalThatVariesBelowThePeakIsNoNewStep) {
  MemoryCurve curve;
  run_step(curve, {10, 20, 90, 40, 30});
  curve.tick(0, 10);
  curve.tick(1, 60);
  EXPECT_TRUE(curve.is_like_last());
  EXPECT_EQ(curve.until_end(), 90U);
  curve.tick(2, 100);
  EXPECT_FALSE(curve.is_like_last());
}

TEST(MemoryCurve, SinksSlowlyAndRisesAtOnce) {
  MemoryCurve curve;
  run_step(curve, {0, 80, 0});
  run_step(curve, {0, 0, 0});
  curve.tick(0, 0);
  EXPECT_EQ(curve.until_next_tick(), 70U);
  curve.tick(1, 100);
  curve.end_step(0);
  curve.tick(0, 0);
  EXPECT_EQ(curve.until_next_tick(), 100U);
}

}  // namespace
}  // namespace pannier
