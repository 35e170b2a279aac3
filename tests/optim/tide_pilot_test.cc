#include "pannier/optim/tide_pilot.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "tests/device/watched_device.h"

namespace pannier {
namespace {

constexpr std::int64_t kNumel = 1000;
constexpr int kNumBuckets = 6;
constexpr std::size_t kNbytes = kNumel * 8;       // fp32: two states.
constexpr std::size_t kActivation = 2 * kNbytes;  // Of a unit.
constexpr std::size_t kLoss = 4 * kNbytes;        // While the loss is computed.

/// A model of as many units as buckets, whose activations pile up in forward and go in backward.
class TidePilotTest : public testing::TestWithParam<std::uint64_t> {
 protected:
  void SetUp() override { start_ = device_.memory().current; }

  void build(std::optional<std::size_t> budget) {
    pilot_.emplace(device_, tide_, routes_, budget ? std::optional(start_ + *budget) : std::nullopt);
  }
  [[nodiscard]] at::Tensor take(std::size_t nbytes) {
    return device_.allocate(static_cast<std::int64_t>(nbytes), at::kByte, Owner::kActivations);
  }
  void step(float value, bool ticks = true) {
    std::vector<at::Tensor> activations;
    for (int unit = 0; unit < kNumBuckets; ++unit) {
      if (ticks) {
        pilot_->tick_forward(unit);
      }
      activations.push_back(take(kActivation));
    }
    if (ticks) {
      pilot_->tick_forward(kNumBuckets);
    }
    (void)take(kLoss);
    const int before = device_.num_up;
    pilot_->begin_backward(true);
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      activations.pop_back();
      pilot_->tick_backward(bucket);
    }
    up_.push({}, {})->wait_done();
    num_up_in_backward_ = device_.num_up - before;
    pilot_->tick_update();
    for (int bucket = kNumBuckets - 1; bucket >= 0; --bucket) {
      const Lease lease = tide_.lease(bucket);
      for (std::int64_t i = 0; i < kNumel; ++i) {
        lease.view().state1[i] += value;
      }
    }
    pilot_->end_step();
  }
  /// The most that a step takes above what was in use before.
  std::size_t peak_of_step(float value, bool ticks = true) {
    device_.reset_peak();
    step(value, ticks);
    return device_.memory().peak - start_;
  }
  void expect_states(float value) {
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      const Lease lease = host_.lease(bucket);
      for (std::int64_t i = 0; i < kNumel; ++i) {
        ASSERT_EQ(lease.view().state1[i], value);
      }
    }
  }

  StateShape shape_{.param_nbytes = 4, .rest_nbytes = 0, .num_states = 2};
  std::vector<std::int64_t> numels_ = std::vector<std::int64_t>(kNumBuckets, kNumel);
  WatchedDevice device_;
  HostMemory memory_;
  HostStateStore host_{memory_, shape_, numels_};
  at::Tensor param_ = at::zeros({kNumel});
  MoverOptions movers_{.delay_seed = GetParam()};
  Mover up_{device_, Queue::kUp, movers_};
  Mover down_{device_, Queue::kDown, movers_};
  Tide tide_{{device_, host_, up_, down_, shape_, numels_, [this](int) { return param_; }}};
  UpdateRoutes routes_{std::vector<UpdateRoute>(kNumBuckets, UpdateRoute::kStreamed), {}, {}, {}};
  std::size_t start_ = 0;
  int num_up_in_backward_ = 0;  ///< Of the last step.
  std::optional<TidePilot> pilot_;
};

constexpr std::size_t kModelPeak = kNumBuckets * kActivation + kLoss;

TEST_P(TidePilotTest, WithoutABudgetThePeakIsTheModels) {
  build(std::nullopt);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(peak_of_step(1.0F), kModelPeak) << i;
  }
  EXPECT_EQ(pilot_->model_peak(), start_ + kModelPeak);
  expect_states(5.0F);
}

TEST_P(TidePilotTest, SaysWhenForwardComesToThePeakBeforeItWaitsForRoom) {
  build(std::nullopt);
  int num_calls = 0;
  std::size_t live = 0;
  pilot_->on_peak([&] {
    ++num_calls;
    live = tide_.live_nbytes();
  });
  step(1.0F);
  EXPECT_EQ(num_calls, 0);  // Where it will be is not known yet.
  step(1.0F);
  EXPECT_EQ(num_calls, 1);
  step(1.0F);
  EXPECT_EQ(num_calls, 2);
  EXPECT_EQ(peak_of_step(1.0F), kModelPeak);
  EXPECT_LE(live, kNumBuckets * kNbytes);
  expect_states(4.0F);
}

TEST_P(TidePilotTest, AForwardWithoutTicksKeepsThePeakToo) {
  build(std::nullopt);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(peak_of_step(1.0F, false), kModelPeak) << i;
    EXPECT_EQ(tide_.live_nbytes(), 0U);
  }
  expect_states(5.0F);
}

TEST_P(TidePilotTest, ThePeakStaysWithinABudget) {
  for (const std::size_t room : {std::size_t{0}, kNbytes, 3 * kNbytes}) {
    build(kModelPeak + room);
    for (int i = 0; i < 4; ++i) {
      EXPECT_LE(peak_of_step(1.0F), kModelPeak + room) << i;
    }
    pilot_.reset();
    tide_.shrink_to(0, true, true);
  }
  expect_states(12.0F);
}

TEST_P(TidePilotTest, ARoomyBudgetKeepsStatesUp) {
  build(kModelPeak + kNumBuckets * kNbytes);
  for (int i = 0; i < 4; ++i) {
    EXPECT_LE(peak_of_step(1.0F), kModelPeak + kNumBuckets * kNbytes);
  }
  EXPECT_EQ(tide_.live_nbytes(), kNumBuckets * kNbytes);
  EXPECT_EQ(device_.num_up, kNumBuckets);
  expect_states(4.0F);
}

TEST_P(TidePilotTest, StatesGoUpInTheRoomThatBackwardFrees) {
  build(std::nullopt);
  step(1.0F);
  EXPECT_EQ(num_up_in_backward_, 0);  // What is ahead is not known yet.
  step(1.0F);
  EXPECT_EQ(num_up_in_backward_, kNumBuckets);
}

TEST_P(TidePilotTest, InAStepUnlikeTheLastNothingGoesUpEarly) {
  build(std::nullopt);
  step(1.0F);
  step(1.0F);
  tide_.shrink_to(0, true, true);
  const int before = device_.num_up;
  pilot_->begin_backward(true);
  pilot_->tick_backward(0);
  up_.push({}, {})->wait_done();
  EXPECT_EQ(device_.num_up, before);
}

TEST_P(TidePilotTest, MemoryThatOthersTookStopsOnlyWhatIsEarly) {
  build(std::nullopt);
  step(1.0F);
  step(1.0F);
  tide_.shrink_to(0, true, true);
  for (int unit = 0; unit <= kNumBuckets; ++unit) {
    pilot_->tick_forward(unit);
  }
  const at::Tensor others = take(kNumBuckets * kActivation);
  const std::size_t cap = device_.memory().current + 2 * kNbytes;
  device_.add_memory_cap(cap);
  pilot_->begin_backward(true);
  EXPECT_NO_THROW(pilot_->tick_backward(0));
  EXPECT_EQ(tide_.live_nbytes(), 2 * kNbytes);
  pilot_->tick_update();
  EXPECT_NO_THROW((void)tide_.lease(0));
  device_.remove_memory_cap(cap);
}

INSTANTIATE_TEST_SUITE_P(Delays, TidePilotTest, testing::Values(0, 1, 2));

}  // namespace
}  // namespace pannier
