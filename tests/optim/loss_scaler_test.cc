#include "pannier/optim/loss_scaler.h"

#include <gmock/gmock.h>

#include <limits>
#include <string>
#include <vector>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The scale after each step of `pattern`: 'o' overflows, 'g' is good.
std::vector<double> scales_after(LossScaler scaler, const std::string& pattern) {
  std::vector<double> scales;
  for (const char step : pattern) {
    scaler.update(step == 'o', "w");
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(LossScaler, FallsToTheMinimumAndThenBlamesTheGradients) {
  LossScaler scaler(LossScaleOptions{.initial_scale_power = 4});
  EXPECT_EQ(scaler.scale(), 16);
  EXPECT_THAT(scales_after(scaler, "ooooo"), ElementsAre(16, 8, 4, 2, 1));
  for (int step = 0; step < 5; ++step) {
    scaler.update(true, "w");
  }
  EXPECT_EQ(scaler.skipped_in_a_row(), 5);
  try {
    scaler.update(true, "layers.3.weight");
    ADD_FAILURE() << "the sixth overflow was accepted";
  } catch (const LossScaleError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("at its minimum 1"), HasSubstr("6 steps were skipped in a row"),
                                    HasSubstr("'layers.3.weight'")));
  }
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_EQ(scaler.skipped_in_a_row(), 6);
  EXPECT_THROW(scaler.update(true, ""), LossScaleError);
  scaler.update(false, "");
  EXPECT_EQ(scaler.skipped_in_a_row(), 0);
}

TEST(LossScaler, SaysWhenTheBadParameterIsElsewhere) {
  LossScaler scaler(LossScaleOptions{.initial_scale_power = 0, .hysteresis = 1});
  try {
    scaler.update(true, "");
    ADD_FAILURE();
  } catch (const LossScaleError& error) {
    EXPECT_THAT(error.what(), HasSubstr("on another rank"));
  }
}

TEST(LossScaler, GrowsAfterAWindowOfGoodSteps) {
  const LossScaler scaler(LossScaleOptions{.initial_scale_power = 2, .loss_scale_window = 2, .hysteresis = 1});
  EXPECT_THAT(scales_after(scaler, "gggggggg"), ElementsAre(4, 4, 8, 8, 16, 16, 32, 32));
}

TEST(LossScaler, CountsTheWindowFromTheLastOverflow) {
  const LossScaler scaler(LossScaleOptions{.initial_scale_power = 2, .loss_scale_window = 2, .hysteresis = 1});
  EXPECT_THAT(scales_after(scaler, "ggoggggo"), ElementsAre(4, 4, 2, 2, 2, 4, 4, 2));
}

TEST(LossScaler, RefillsHysteresisAtAGoodStepIfConsecutive) {
  LossScaleOptions options{.initial_scale_power = 4, .consecutive_hysteresis = true};
  EXPECT_THAT(scales_after(LossScaler(options), "ogogoo"), ElementsAre(16, 16, 16, 16, 16, 8));
  options.consecutive_hysteresis = false;
  EXPECT_THAT(scales_after(LossScaler(options), "ogogoo"), ElementsAre(16, 16, 8, 8, 4, 2));
}

TEST(LossScaler, RefillsHysteresisWhenItGrows) {
  const LossScaler scaler(LossScaleOptions{.initial_scale_power = 2, .loss_scale_window = 1});
  EXPECT_THAT(scales_after(scaler, "oggoo"), ElementsAre(4, 4, 8, 8, 4));
}

TEST(LossScaler, NeverGoesBelowTheMinimum) {
  const LossScaler scaler(LossScaleOptions{.initial_scale_power = 2, .hysteresis = 1, .min_loss_scale = 3});
  EXPECT_THAT(scales_after(scaler, "o"), ElementsAre(3));
}

TEST(LossScaler, StopsGrowingBeforeItOverflows) {
  LossScaler scaler(LossScaleOptions{.initial_scale_power = 99, .loss_scale_window = 1, .hysteresis = 1});
  for (int step = 0; step < 10; ++step) {
    scaler.update(false, "");
  }
  EXPECT_EQ(scaler.scale(), 0x1p100);
}

TEST(LossScaler, StaticScaleNeverChanges) {
  LossScaler scaler(LossScaleOptions{.static_scale = 128});
  EXPECT_FALSE(scaler.is_dynamic());
  EXPECT_THAT(scales_after(scaler, "ooogggo"), ::testing::Each(128.0));
  scaler.update(true, "w");
  EXPECT_EQ(scaler.skipped_in_a_row(), 1);
}

TEST(LossScaler, DefaultsToNoScaling) {
  EXPECT_THAT(scales_after(LossScaler(), "gogo"), ::testing::Each(1.0));
  EXPECT_EQ(LossScaler(LossScaleOptions{}).scale(), 65536);
}

TEST(LossScaler, ResumesAsIfItHadNeverStopped) {
  const LossScaleOptions options{.initial_scale_power = 6, .loss_scale_window = 2};
  const std::string pattern = "ggogoggggoog";
  LossScaler whole(options);
  LossScaler first(options);
  for (std::size_t step = 0; step < pattern.size(); ++step) {
    LossScaler resumed(options);
    resumed.load_state(first.state());
    first = resumed;
    whole.update(pattern[step] == 'o', "w");
    first.update(pattern[step] == 'o', "w");
    EXPECT_EQ(whole.scale(), first.scale()) << "step " << step;
    EXPECT_EQ(whole.state().hysteresis_left, first.state().hysteresis_left) << "step " << step;
  }
}

TEST(LossScaler, StaticScaleOutlivesASavedOne) {
  LossScaler scaler(LossScaleOptions{.static_scale = 128});
  scaler.load_state(LossScaler(LossScaleOptions{}).state());
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, RefusesAStateThatCannotBe) {
  LossScaler scaler(LossScaleOptions{});
  for (const LossScalerState& state :
       {LossScalerState{.scale = 0}, LossScalerState{.scale = std::numeric_limits<double>::quiet_NaN()},
        LossScalerState{.iteration = -1}, LossScalerState{.last_overflow_iteration = 7},
        LossScalerState{.hysteresis_left = 0}, LossScalerState{.skipped_in_a_row = -1}}) {
    EXPECT_THROW(scaler.load_state(state), ConfigError);
  }
  EXPECT_EQ(scaler.scale(), 65536);
}

TEST(LossScaleOptions, NameFieldRangeAndValue) {
  const auto message = [](const LossScaleOptions& options) -> std::string {
    try {
      options.validate();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message({.static_scale = -1}), "fp16.loss_scale must be 0 (dynamic) or a positive number, got -1");
  EXPECT_EQ(message({.initial_scale_power = 101}), "fp16.initial_scale_power must be from 0 to 100, got 101");
  EXPECT_EQ(message({.loss_scale_window = 0}), "fp16.loss_scale_window must be positive, got 0");
  EXPECT_EQ(message({.hysteresis = 0}), "fp16.hysteresis must be positive, got 0");
  EXPECT_EQ(message({.min_loss_scale = 0}), "fp16.min_loss_scale must be positive, got 0");
  EXPECT_THAT(message({.initial_scale_power = 2, .min_loss_scale = 8}), HasSubstr("min_loss_scale 8 is above"));
  // A static scale does not read the rest.
  EXPECT_EQ(message({.static_scale = 8, .loss_scale_window = 0}), "accepted");
}

}  // namespace
}  // namespace pannier
