// The rules against their formulas in double, and golden values that a plain AdamW in torch gives.
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <numbers>

#include "pannier/kernels/update.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

using kernels::Hyperparameters;
using kernels::make_coefficients;
using kernels::update;
using kernels::UpdateBuffers;

/// torch's rules, element by element, in double.
struct DoubleElement {
  double w = 0;
  double state1 = 0;
  double state2 = 0;

  void step(Algorithm algorithm, const Hyperparameters& h, int step, double g) {
    const bool is_decoupled = algorithm == Algorithm::kAdamW || algorithm == Algorithm::kLion;
    const double decayed = is_decoupled ? w * (1 - h.lr * h.weight_decay) : w;
    g += is_decoupled ? 0 : h.weight_decay * w;
    if (algorithm == Algorithm::kAdamW || algorithm == Algorithm::kAdam) {
      state1 = h.beta1 * state1 + (1 - h.beta1) * g;
      state2 = h.beta2 * state2 + (1 - h.beta2) * g * g;
      const double bias1 = h.bias_correction ? 1 - std::pow(h.beta1, step) : 1;
      const double bias2 = h.bias_correction ? 1 - std::pow(h.beta2, step) : 1;
      w = decayed - h.lr / bias1 * state1 / (std::sqrt(state2) / std::sqrt(bias2) + h.eps);
    } else if (algorithm == Algorithm::kSgd) {
      state1 = step == 1 ? g : h.momentum * state1 + (1 - h.dampening) * g;
      w -= h.lr * (h.momentum == 0 ? g : h.nesterov ? g + h.momentum * state1 : state1);
    } else if (algorithm == Algorithm::kAdagrad) {
      state1 += g * g;
      w -= h.lr / (1 + (step - 1) * h.lr_decay) * g / (std::sqrt(state1) + h.eps);
    } else {
      const double c = h.beta1 * state1 + (1 - h.beta1) * g;
      w = decayed - h.lr * (c > 0 ? 1 : c < 0 ? -1 : 0);
      state1 = h.beta2 * state1 + (1 - h.beta2) * g;
    }
  }
};

class UpdateFormula : public ::testing::TestWithParam<Rule> {};

TEST_P(UpdateFormula, HoldsInDouble) {
  const Rule& rule = GetParam();
  constexpr std::size_t kNumel = 500;
  constexpr double kFactor = 0.25;
  for (const bool bias_correction : {true, false}) {
    auto hyper = rule.hyper;
    hyper.bias_correction = bias_correction;
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    std::array<DoubleElement, kNumel> expected;
    std::array<float, kNumel> w{};
    std::array<float, kNumel> state1{};
    std::array<float, kNumel> state2{};
    std::array<float, kNumel> grad{};
    for (std::size_t i = 0; i < kNumel; ++i) {
      w[i] = normal(random);
      expected[i].w = static_cast<double>(w[i]);
    }
    for (int step = 1; step <= 10; ++step) {
      for (std::size_t i = 0; i < kNumel; ++i) {
        grad[i] = normal(random);
        expected[i].step(rule.algorithm, hyper, step, kFactor * static_cast<double>(grad[i]));
      }
      const UpdateBuffers buffers{w.data(),
                                  nullptr,
                                  rule.num_states >= 1 ? state1.data() : nullptr,
                                  rule.num_states >= 2 ? state2.data() : nullptr,
                                  grad.data(),
                                  GradType::kFp32,
                                  kNumel};
      update(rule.algorithm, StateFormat::kFp32,
             make_coefficients(rule.algorithm, hyper, step, static_cast<float>(kFactor)), buffers);
    }
    for (std::size_t i = 0; i < kNumel; ++i) {
      ASSERT_NEAR(static_cast<double>(w[i]), expected[i].w, 2e-6 * std::max(1.0, std::abs(expected[i].w))) << i;
      if (rule.num_states >= 1) {
        ASSERT_NEAR(static_cast<double>(state1[i]), expected[i].state1, 2e-6 * std::max(1.0, expected[i].state1)) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllRules, UpdateFormula, ::testing::ValuesIn(all_rules()),
                         [](const auto& rule) { return rule.param.name; });

struct Golden {
  std::int64_t numel;
  double sum;
  double last;
};

TEST(AdamW, GivesGoldenValuesForEveryTail) {
  constexpr std::array<Golden, 12> kGolden = {{{1, -0.048499, -0.0484985},
                                               {3, 1.701395, 0.9573414},
                                               {7, -0.151701, -0.3277743},
                                               {8, 0.456459, 0.6081595},
                                               {9, 1.493821, 1.0373622},
                                               {15, 1.139261, 0.9416136},
                                               {16, 1.837723, 0.6984613},
                                               {17, 1.598462, -0.2392608},
                                               {31, 0.231412, -1.0360363},
                                               {33, 0.281730, 0.5026525},
                                               {1023, 1.055324, -0.7829105},
                                               {1025, -0.116155, -0.2069527}}};
  Rule rule = all_rules()[0];
  rule.hyper = Hyperparameters{};
  rule.hyper.lr = 0.01;
  rule.hyper.weight_decay = 0.01;
  std::mt19937 random(10);
  for (const auto format : {StateFormat::kFp32, StateFormat::kFp16, StateFormat::kBf16}) {
    for (const auto& golden : kGolden) {
      RunBuffers run(rule, {format, GradType::kFp32}, golden.numel, random);
      std::memset(run.state1.as<char>(), 0, run.state1.nbytes());
      std::memset(run.state2.as<char>(), 0, run.state2.nbytes());
      for (std::int64_t i = 0; i < golden.numel; ++i) {
        run.set_weight(format, i, static_cast<float>(std::sin(static_cast<double>(i))));
      }
      for (int step = 1; step <= 5; ++step) {
        for (std::int64_t i = 0; i < golden.numel; ++i) {
          run.grad.as<float>()[i] = static_cast<float>(step * std::cos(static_cast<double>(i)));
        }
        update(rule.algorithm, format, make_coefficients(rule.algorithm, rule.hyper, step, 1.0F), run.buffers());
      }
      double sum = 0;
      for (std::int64_t i = 0; i < golden.numel; ++i) {
        sum += static_cast<double>(run.weight(format, i));
      }
      EXPECT_NEAR(sum, golden.sum, 1e-4) << golden.numel;
      EXPECT_NEAR(static_cast<double>(run.weight(format, golden.numel - 1)), golden.last, 1e-6) << golden.numel;
    }
  }
}

TEST(Coefficients, AreRoundedOnceFromDouble) {
  Hyperparameters hyper;
  hyper.lr = 1e-3;
  hyper.weight_decay = 0.01;
  const auto c = make_coefficients(Algorithm::kAdamW, hyper, 7, 0.5F);
  EXPECT_EQ(c.grad_factor, 0.5F);
  EXPECT_EQ(c.one_minus_beta2, static_cast<float>(1 - 0.999));
  EXPECT_EQ(c.neg_step_size, static_cast<float>(-1e-3 / (1 - std::pow(0.9, 7))));
  EXPECT_EQ(c.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(1 - std::pow(0.999, 7))));
  EXPECT_EQ(c.neg_lr_decay, static_cast<float>(-1e-3 * 0.01));
  EXPECT_EQ(c.weight_decay, 0.0F);
}

TEST(Coefficients, HaveNoNegativeZeroDecay) {
  const auto c = make_coefficients(Algorithm::kAdamW, Hyperparameters{}, 1, 1.0F);
  EXPECT_FALSE(std::signbit(c.neg_lr_decay));
}

TEST(Coefficients, DampenSgdFromTheSecondStepOn) {
  Hyperparameters hyper;
  hyper.momentum = 0.9;
  hyper.dampening = 0.5;
  EXPECT_EQ(make_coefficients(Algorithm::kSgd, hyper, 1, 1.0F).one_minus_beta1, 1.0F);
  EXPECT_EQ(make_coefficients(Algorithm::kSgd, hyper, 2, 1.0F).one_minus_beta1, 0.5F);
}

TEST(StateNames, AreTorchs) {
  using ::testing::ElementsAre;
  EXPECT_THAT(kernels::state_names(Algorithm::kAdamW, 0), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(kernels::state_names(Algorithm::kSgd, 0), ElementsAre());
  EXPECT_THAT(kernels::state_names(Algorithm::kSgd, 0.9), ElementsAre("momentum_buffer"));
  EXPECT_THAT(kernels::state_names(Algorithm::kAdagrad, 0), ElementsAre("sum"));
  EXPECT_THAT(kernels::state_names(Algorithm::kLion, 0), ElementsAre("exp_avg"));
}

}  // namespace
}  // namespace pannier::testing
