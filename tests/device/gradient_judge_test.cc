#include "pannier/device/gradient_judge.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "pannier/device/compute.h"

namespace pannier {
namespace {

std::vector<float> values(std::size_t count, float first) {
  std::vector<float> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    result[i] = first / static_cast<float>(i + 1);
  }
  return result;
}

GradientRun run_of(const std::vector<float>& gradient, int parameter) {
  return {gradient.data(), kernels::GradType::kFp32, static_cast<std::int64_t>(gradient.size()), parameter};
}

kernels::GradientStats stats_of(const std::vector<float>& gradient) {
  return kernels::gradient_stats(gradient.data(), kernels::GradType::kFp32, static_cast<std::int64_t>(gradient.size()),
                                 torch_parallel_for());
}

void expect_same(const kernels::Decision& left, const kernels::Decision& right) {
  EXPECT_EQ(left.sum_of_squares, right.sum_of_squares);
  EXPECT_EQ(left.norm, right.norm);
  EXPECT_EQ(left.num_nonfinite, right.num_nonfinite);
  EXPECT_EQ(left.grad_factor, right.grad_factor);
  EXPECT_EQ(left.skip, right.skip);
}

TEST(GradientJudge, DecidesAsTheKernelsDoWhereverTheStatsComeFrom) {
  const std::vector<float> a = values(5000, 3.0F);
  const std::vector<float> b = values(17, -2.0F);
  kernels::GradientStats both = stats_of(a);
  both.sum_of_squares.add(stats_of(b).sum_of_squares);
  for (const kernels::DecisionInputs inputs : {kernels::DecisionInputs{}, kernels::DecisionInputs{8.0, 0.125, true}}) {
    const auto judge = make_cpu_judge();
    for (int window = 0; window < 2; ++window) {
      judge->reset();
      window == 0 ? judge->add({run_of(a, 0), run_of(b, 1)}) : judge->add({run_of(b, 1)});
      if (window == 1) {
        judge->add_stats(stats_of(a), 0);
      }
      judge->decide(inputs);
      const Verdict verdict = judge->verdict();
      expect_same(verdict.decision, kernels::decide(both, inputs));
      EXPECT_EQ(verdict.first_nonfinite_parameter, -1);
      EXPECT_EQ(*judge->control().grad_factor, verdict.decision.grad_factor);
      EXPECT_EQ(*judge->control().skip, verdict.decision.skip);
    }
  }
}

TEST(GradientJudge, NamesTheFirstParameterThatIsNotFinite) {
  const std::vector<float> good = values(9, 1.0F);
  std::vector<float> bad = good;
  bad[4] = std::numeric_limits<float>::quiet_NaN();
  const auto judge = make_cpu_judge();
  judge->add({run_of(good, 0), run_of(bad, 7)});
  judge->add_stats(stats_of(bad), 3);
  judge->add({run_of(bad, 5)});
  judge->decide({});
  EXPECT_EQ(judge->verdict().first_nonfinite_parameter, 3);
  EXPECT_EQ(judge->verdict().decision.num_nonfinite, 3);
  EXPECT_NE(*judge->control().skip, 0U);
  judge->reset();
  judge->add({run_of(good, 0)});
  judge->decide({});
  EXPECT_EQ(judge->verdict().first_nonfinite_parameter, -1);
  EXPECT_EQ(*judge->control().skip, 0U);
}

TEST(GradientJudge, ExchangedNumbersDecide) {
  const std::vector<float> a = values(100, 1.0F);
  const auto judge = make_cpu_judge();
  judge->add({run_of(a, 0)});
  judge->exchange([](std::span<std::int64_t> numbers) {
    for (std::int64_t& number : numbers) {
      number *= 2;  // Another rank has the same.
    }
  });
  judge->decide({});
  kernels::GradientStats twice = stats_of(a);
  twice.sum_of_squares.add(stats_of(a).sum_of_squares);
  expect_same(judge->verdict().decision, kernels::decide(twice, {}));
}

}  // namespace
}  // namespace pannier
