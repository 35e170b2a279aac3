#include "pannier/zero/gradient_reducer.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

/// A store that lets go of what it takes at once, as one in host memory may.
class LettingGo final : public GradientStore {
 public:
  void add(int /*parameter*/, at::Tensor gradient, bool /*last*/) override { gradient.zero_(); }
  void flush(int /*bucket*/) override {}
  [[nodiscard]] GradientView view(int /*parameter*/) override { return {}; }
  [[nodiscard]] bool is_on_device(int /*parameter*/) const override { return false; }
  void write(int /*parameter*/, const at::Tensor& /*flat*/) override {}
  [[nodiscard]] at::Tensor read(int /*parameter*/) override { return {}; }
  void drop(int /*parameter*/) override {}
  void free_sent(bool /*wait*/) override {}
};

/// Three parameters of one element in buckets of their own, whose gradients are whatever the loss makes them.
class GradientReducerTest : public testing::Test {
 protected:
  void SetUp() override {
    for (auto& parameter : parameters_) {
      parameter.set_requires_grad(true);
    }
    buckets_ = std::make_unique<ParameterBuckets>(*device_, layout_, parameters_,
                                                  std::vector<std::string>{"a", "b", "c"}, at::kFloat);
    for (int b = 0; b < layout_.num_buckets(); ++b) {
      buckets_->fill(b, [](const Segment&, const at::Tensor&) {});
    }
    store_ = make_device_gradients(*device_, layout_.num_parameters(), {});
    reducer_ = std::make_unique<GradientReducer>(
        GradientReducerParts{*device_, shards_, *buckets_, *store_, *communicator_, *judge_});
  }

  void fire(int parameter, float gradient) {
    (parameters_[static_cast<std::size_t>(parameter)] * gradient).sum().backward();
  }
  void window(const std::vector<std::pair<int, float>>& firings) {
    reducer_->begin_backward(true);
    for (const auto& [parameter, gradient] : firings) {
      fire(parameter, gradient);
    }
    reducer_->end_backward();
  }
  float value(int parameter) { return *static_cast<const float*>(store_->view(parameter).data); }

  std::unique_ptr<Device> device_ = make_metered_cpu();
  std::vector<at::Tensor> parameters_{at::zeros({1}), at::zeros({1}), at::zeros({1})};
  std::vector<std::int64_t> numels_{1, 1, 1};
  BucketLayout layout_{numels_, {.bucket_numel = 1}};
  ShardLayout shards_{layout_, 0, 1};
  std::unique_ptr<Communicator> communicator_ = make_solo_communicator();
  std::unique_ptr<ParameterBuckets> buckets_;
  std::unique_ptr<GradientStore> store_;
  std::unique_ptr<GradientJudge> judge_ = make_cpu_judge();
  std::unique_ptr<GradientReducer> reducer_;
};

TEST_F(GradientReducerTest, AddsWhatFiresSeveralTimesInOneBackward) {
  window({{0, 2.0F}, {0, 3.0F}, {1, 4.0F}});
  reducer_->finish_window();
  judge_->decide({});
  const Verdict verdict = judge_->verdict();
  EXPECT_EQ(value(0), 5.0F);
  EXPECT_EQ(verdict.decision.sum_of_squares, 41.0);
  EXPECT_TRUE(reducer_->used(1));
  EXPECT_FALSE(reducer_->used(2));
  EXPECT_FALSE(parameters_[0].grad().defined());
}

TEST_F(GradientReducerTest, ABucketClosesOnceItHasFiredAsRecorded) {
  window({{0, 1.0F}, {0, 1.0F}});
  reducer_->drop_window(true);
  reducer_->begin_backward(true);
  fire(0, 1.0F);
  EXPECT_EQ(store_->view(0).data, nullptr);
  fire(0, 1.0F);
  EXPECT_EQ(value(0), 2.0F);
  reducer_->end_backward();
}

TEST_F(GradientReducerTest, AGradientAfterClosingIsAddedAndWaitedForFromThenOn) {
  window({{0, 1.0F}});
  reducer_->drop_window(true);
  window({{0, 1.0F}, {0, 2.0F}, {0, 3.0F}});
  reducer_->finish_window();
  judge_->decide({});
  EXPECT_EQ(value(0), 6.0F);
  EXPECT_EQ(judge_->verdict().decision.norm, 6.0F);
  EXPECT_FALSE(reducer_->has_late());
  reducer_->drop_window(true);
  reducer_->begin_backward(true);
  fire(0, 1.0F);
  fire(0, 1.0F);
  EXPECT_EQ(store_->view(0).data, nullptr);
  fire(0, 1.0F);
  EXPECT_EQ(value(0), 3.0F);
  reducer_->end_backward();
}

TEST_F(GradientReducerTest, AParameterThatWasNeverUsedMayComeLater) {
  window({{0, 1.0F}});
  reducer_->drop_window(true);
  window({{0, 1.0F}, {2, 7.0F}});
  EXPECT_EQ(value(2), 7.0F);
}

TEST_F(GradientReducerTest, FindsTheFirstNonFiniteParameter) {
  window({{2, std::numeric_limits<float>::infinity()}, {1, std::numeric_limits<float>::quiet_NaN()}, {0, 1.0F}});
  reducer_->finish_window();
  judge_->decide({});
  const Verdict verdict = judge_->verdict();
  EXPECT_EQ(verdict.decision.num_nonfinite, 2);
  EXPECT_EQ(verdict.first_nonfinite_parameter, 1);
}

TEST_F(GradientReducerTest, JudgesAGradientBeforeTheStoreMayLetItGo) {
  LettingGo store;
  reducer_.reset();
  reducer_ = std::make_unique<GradientReducer>(
      GradientReducerParts{*device_, shards_, *buckets_, store, *communicator_, *judge_});
  window({{0, 3.0F}, {1, 4.0F}});
  reducer_->finish_window();
  judge_->decide({});
  EXPECT_EQ(judge_->verdict().decision.sum_of_squares, 25.0);
  reducer_.reset();
}

TEST_F(GradientReducerTest, HooksAgainWhatLostItsNode) {
  const at::Tensor replaced = parameters_[1].detach().clone();
  parameters_[1].set_data(at::zeros({1}, at::kDouble));
  parameters_[1].set_data(replaced);
  EXPECT_THROW(reducer_->check_hooks(), ConfigError);
  EXPECT_NO_THROW(reducer_->check_hooks());
  parameters_[1].set_data(at::zeros({1}, at::kDouble));
  parameters_[1].set_data(replaced);
  reducer_->renew_hooks();
  window({{1, 3.0F}});
  EXPECT_EQ(value(1), 3.0F);
  EXPECT_NO_THROW(reducer_->check_hooks());
}

TEST_F(GradientReducerTest, NoticesARefusedGradient) {
  reducer_->on_unannounced([](int) { throw ConfigError("not now"); });
  EXPECT_ANY_THROW(fire(0, 1.0F));
  EXPECT_TRUE(reducer_->backward_failed());
  reducer_->drop_window(false);
  EXPECT_FALSE(reducer_->backward_failed());
  window({{0, 1.0F}});
  EXPECT_FALSE(reducer_->backward_failed());
}

TEST_F(GradientReducerTest, AGradientLeftInGradIsAnError) {
  parameters_[1].mutable_grad() = at::ones({1});
  EXPECT_THROW(reducer_->check_hooks(), ConfigError);
}

TEST_F(GradientReducerTest, CopiesAGradientThatSomebodyKeptAndCountsBoth) {
  at::Tensor kept;
  parameters_[1].register_hook([&](const at::Tensor& gradient) { kept = gradient; });
  const std::size_t before = device_->memory().current_by_owner[1];
  window({{0, 2.0F}, {1, 3.0F}});
  EXPECT_NE(store_->view(1).data, kept.data_ptr());
  EXPECT_EQ(value(1), 3.0F);
  EXPECT_EQ(device_->memory().current_by_owner[1] - before, 8U);
}

TEST_F(GradientReducerTest, ItsEndRemovesTheHooks) {
  EXPECT_TRUE(GradientHook::is_hooked(parameters_[0]));
  reducer_.reset();
  EXPECT_FALSE(GradientHook::is_hooked(parameters_[0]));
  fire(0, 2.0F);
  EXPECT_EQ(parameters_[0].grad().item<float>(), 2.0F);
}

}  // namespace
}  // namespace pannier
