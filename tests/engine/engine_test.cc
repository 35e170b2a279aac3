#include "pannier/engine/engine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <array>

#include "pannier/base/error.h"
#include "pannier/engine/metrics.h"

namespace pannier {
namespace {

std::string config_text(const std::string& home, int stage, const std::string& extra = "") {
  return fmt::format(R"({{"train_batch_size": 4, "gradient_accumulation_steps": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01, "weight_decay": 0.1}}}},
    "zero_optimization": {{"stage": {}, "offload_optimizer": {{"device": "{}"}}}}{}}})",
                     stage, home, extra);
}

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Linear(16, 1));
}

std::vector<at::Tensor> train(const std::string& text, int steps) {
  auto model = make_model();
  const auto engine = initialize(model, Config::from_text(text));
  torch::manual_seed(2);
  for (int i = 0; i < steps * 2; ++i) {
    engine->begin_unit(0);
    const at::Tensor x = at::randn({2, 8}).to(model->parameters()[0].scalar_type());
    (void)engine->backward(model->forward(x).to(at::kFloat).pow(2).mean());
    (void)engine->step();
  }
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    weights.push_back(engine->core().state(i, "fp32_param"));
  }
  return weights;
}

TEST(Engine, StageAndHomeChangeNoBit) {
  for (const std::string dtype :
       {"", R"(, "bf16": {"enabled": true})", R"(, "fp16": {"enabled": true, "loss_scale": 128})"}) {
    const auto expected = train(config_text("none", 0, dtype), 5);
    for (const std::string home : {"none", "cpu"}) {
      for (int stage = home == "none" ? 0 : 1; stage <= 3; ++stage) {
        const auto actual = train(config_text(home, stage, dtype), 5);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(at::equal(expected[i], actual[i])) << dtype << home << stage;
        }
      }
    }
  }
}

TEST(Engine, ParametersThatRestInHostMemoryChangeNoBitAndAreRefusedOutsideOfAForward) {
  for (const std::string home : {"none", "cpu"}) {
    const std::string text = fmt::format(
        R"({{"train_batch_size": 4, "gradient_accumulation_steps": 2,
        "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01, "weight_decay": 0.1}}}},
        "zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": "{}"}},
                              "offload_param": {{"device": "cpu"}}, "stage3_param_persistence_threshold": 1}}}})",
        home);
    const auto expected = train(config_text("none", 0), 5);
    const auto actual = train(text, 5);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(expected[i], actual[i])) << home;
    }
    auto model = make_model();
    const auto engine = initialize(model, Config::from_text(text));
    EXPECT_ANY_THROW((void)model->forward(at::ones({2, 8})));
    engine->begin_unit(0);
    EXPECT_NO_THROW((void)model->forward(at::ones({2, 8})));
  }
}

// A frozen layer of another type between trained ones.
class WithFrozen : public torch::nn::Module {
 public:
  WithFrozen() {
    torch::manual_seed(1);
    first_ = register_module("first", torch::nn::Linear(8, 128));
    base_ = register_parameter("base", at::randn({128, 128}).to(at::kBFloat16), /*requires_grad=*/false);
    last_ = register_module("last", torch::nn::Linear(128, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last_(at::matmul(first_(x).to(at::kBFloat16), base_).to(at::kFloat));
  }
  [[nodiscard]] const at::Tensor& base() const { return base_; }

 private:
  torch::nn::Linear first_{nullptr};
  at::Tensor base_;
  torch::nn::Linear last_{nullptr};
};

TEST(Engine, AFrozenParameterRestsWhereParametersDoAndStaysAsItWas) {
  const auto run = [](int stage, const std::string& param_home) {
    const auto model = std::make_shared<WithFrozen>();
    const at::Tensor given = model->base().clone();
    const auto engine =
        initialize(model, Config::from_text(fmt::format(
                              R"({{"train_batch_size": 2, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
        "zero_optimization": {{"stage": {}, "offload_param": {{"device": "{}"}}, "stage3_param_persistence_threshold": 200}}}})",
                              stage, param_home)));
    const std::size_t resting =
        engine->core().device().memory().current_by_owner[static_cast<std::size_t>(Owner::kParameters)];
    EXPECT_EQ(engine->core().plan().host_parameters >= given.nbytes(), param_home == "cpu");
    if (param_home == "cpu") {
      EXPECT_ANY_THROW((void)model->base().sum());
      EXPECT_LT(resting, given.nbytes());
    }
    torch::manual_seed(2);
    for (int i = 0; i < 3; ++i) {
      engine->begin_unit(0);
      (void)engine->backward(model->forward(at::randn({2, 8})).pow(2).mean());
      (void)engine->step();
    }
    engine->core().hold({0, 1, 2, 3, 4}, /*watches=*/false);
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : model->parameters()) {
      all.push_back(parameter.detach().clone());
    }
    EXPECT_TRUE(at::equal(model->base(), given));
    engine->core().let_go({0, 1, 2, 3, 4}, std::nullopt);
    return all;
  };
  const auto expected = run(2, "none");
  const auto actual = run(3, "cpu");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], actual[i])) << i;
  }
}

TEST(Engine, Fp32IsTheReferenceArithmeticBitForBit) {
  for (const std::string home : {"none", "cpu"}) {
    auto model = make_model();
    const auto engine = initialize(model, Config::from_text(config_text(home, 2, R"(, "gradient_clipping": 0)")));
    const kernels::Hyperparameters hyper{.lr = 0.01, .weight_decay = 0.1};
    const auto parameters = model->parameters();
    std::vector<std::array<at::Tensor, 3>> expected;
    for (const auto& parameter : parameters) {
      expected.push_back({parameter.detach().clone(), at::zeros_like(parameter), at::zeros_like(parameter)});
    }
    for (int step = 1; step <= 20; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        (void)engine->backward(model->forward(at::randn({2, 8})).pow(2).mean());
        for (std::size_t i = 0; micro == 1 && i < parameters.size(); ++i) {
          const at::Tensor gradient = engine->core().gradient(static_cast<int>(i)).value();
          kernels::update(kernels::Algorithm::kAdamW, kernels::StateFormat::kFp32,
                          kernels::make_coefficients(kernels::Algorithm::kAdamW, hyper, step, 1.0F),
                          {.param = expected[i][0].data_ptr(),
                           .state1 = expected[i][1].data_ptr<float>(),
                           .state2 = expected[i][2].data_ptr<float>(),
                           .grad = gradient.data_ptr(),
                           .numel = gradient.numel()},
                          "reference");
        }
        (void)engine->step();
      }
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::equal(parameters[i], expected[i][0])) << home << step << i;
        EXPECT_TRUE(at::equal(engine->core().state(static_cast<int>(i), "exp_avg_sq"), expected[i][2]));
      }
    }
  }
}

TEST(Engine, AnOverlappedStepChangesNoBit) {
  for (const std::string dtype : {"", R"(, "bf16": {"enabled": true})"}) {
    const auto expected = train(config_text("cpu", 2, dtype), 5);
    for (const std::string seed : {"0", "1", "2"}) {
      const std::string overlap = R"(, "pannier": {"overlap_step": true, "stress_seed": )" + seed + "}";
      const auto actual = train(config_text("cpu", 2, dtype + overlap), 5);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::equal(expected[i], actual[i])) << dtype << seed << i;
      }
    }
  }
}

TEST(Engine, AnOverlappedStepGivesParametersBackUnitByUnit) {
  auto model = make_model();
  const auto parameters = model->parameters();
  const auto engine = initialize(model, Config::from_text(R"({"train_batch_size": 1, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1},
        "pannier": {"overlap_step": true}})"));
  engine->core().set_units({{}, {0, 1}, {2, 3}});
  const auto is_away = [&](std::size_t i) {
    try {
      (void)parameters[i].data_ptr();
    } catch (const c10::Error&) {
      return true;
    }
    return false;
  };
  for (int step = 0; step < 4; ++step) {
    engine->begin_unit(0);
    if (step > 0) {
      EXPECT_TRUE(is_away(0) && is_away(3));
    }
    engine->begin_unit(1);
    EXPECT_FALSE(is_away(0) || is_away(1));
    engine->begin_unit(2);
    const at::Tensor loss = model->forward(at::ones({1, 8})).pow(2).mean();
    (void)engine->backward(loss);
    (void)engine->step();
    EXPECT_TRUE(is_away(0) && is_away(1) && is_away(2) && is_away(3));
    EXPECT_THROW((void)model->forward(at::ones({1, 8})), c10::Error);
  }
  engine->core().synchronize();
  EXPECT_FALSE(is_away(0) || is_away(3));
}

TEST(Engine, LearningFollowsTheSchedule) {
  auto model = make_model();
  const auto engine = initialize(
      model,
      Config::from_text(config_text("cpu", 2, R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2,
      "warmup_type": "linear", "warmup_max_lr": 0.5}})")));
  EXPECT_THAT(engine->lrs(), testing::ElementsAre(0.0));
  for (int i = 0; i < 6; ++i) {
    (void)engine->backward(model->forward(at::ones({2, 8})).pow(2).mean());
    (void)engine->step();
  }
  EXPECT_THAT(engine->lrs(), testing::ElementsAre(0.5));
}

TEST(Engine, GroupsHaveTheirOwnValues) {
  auto model = make_model();
  kernels::Hyperparameters still;
  still.lr = 0;
  kernels::Hyperparameters moving;
  moving.lr = 0.1;
  const auto parameters = model->parameters();
  const auto engine =
      initialize(model, Config::from_text(config_text("cpu", 2)),
                 {.groups = {{{parameters[0], parameters[1]}, still}, {{parameters[2], parameters[3]}, moving}}});
  const at::Tensor first = parameters[0].detach().clone();
  const at::Tensor third = parameters[2].detach().clone();
  for (int i = 0; i < 2; ++i) {
    (void)engine->backward(model->forward(at::ones({2, 8})).pow(2).mean());
    (void)engine->step();
  }
  EXPECT_TRUE(at::equal(parameters[0], first));
  EXPECT_FALSE(at::equal(parameters[2], third));
}

TEST(Engine, RefusesWhatCannotBe) {
  auto model = make_model();
  const Config config = Config::from_text(config_text("cpu", 2));
  EXPECT_THROW((void)initialize(std::shared_ptr<torch::nn::Module>(), config), ConfigError);
  EXPECT_THROW((void)initialize(model, config, {.groups = {{{at::ones({2})}, {}}}}), ConfigError);
  const auto twice = model->parameters()[0];
  EXPECT_THROW((void)initialize(model, config, {.groups = {{{twice, twice}, {}}}}), ConfigError);
  const auto engine = initialize(model, config);
  EXPECT_THROW((void)initialize(model, config), ConfigError);
  EXPECT_THROW((void)engine->step(), ConfigError);
  EXPECT_THROW((void)engine->backward(at::ones({1})), ConfigError);
  EXPECT_THROW((void)engine->backward(model->forward(at::ones({2, 8}))), ConfigError);
  EXPECT_THROW((void)engine->core().state(0, "velocity"), ConfigError);
  EXPECT_THROW(engine->core().set_state(0, "exp_avg", at::ones({3})), ConfigError);
  EXPECT_THROW(engine->set_hyperparameters(3, {}), ConfigError);
  EXPECT_THROW(engine->core().set_gradient(0, at::ones({16, 8})), ConfigError);
  engine->core().close();
  EXPECT_THROW((void)engine->step(), ConfigError);
  EXPECT_NO_THROW((void)initialize(model, config));
}

TEST(Engine, APlanAboveItsBudgetIsRefusedBeforeAnythingMoves) {
  auto model = make_model();
  const void* before = model->parameters()[0].data_ptr();
  EXPECT_THROW(
      (void)initialize(model, Config::from_text(config_text("none", 0, R"(, "pannier": {"device_memory": "1KiB"})"))),
      OutOfMemoryError);
  EXPECT_THROW(
      (void)initialize(model, Config::from_text(config_text("cpu", 2, R"(, "pannier": {"host_memory": "1KiB"})"))),
      OutOfMemoryError);
  EXPECT_EQ(model->parameters()[0].data_ptr(), before);
}

TEST(Engine, ABackwardThatThrowsDropsItsWindow) {
  auto model = make_model();
  const auto engine = initialize(model, Config::from_text(config_text("cpu", 2)));
  const at::Tensor before = model->parameters()[0].detach().clone();
  const at::Tensor loss = model->forward(at::ones({2, 8})).pow(2).mean();
  (void)engine->backward(loss);
  EXPECT_ANY_THROW((void)engine->backward(loss));
  EXPECT_THROW((void)engine->step(), ConfigError);
  EXPECT_TRUE(at::equal(model->parameters()[0], before));
  for (int i = 0; i < 2; ++i) {
    (void)engine->backward(model->forward(at::ones({2, 8})).pow(2).mean());
    (void)engine->step();
  }
  EXPECT_FALSE(at::equal(model->parameters()[0], before));
}

TEST(Engine, ANonFiniteGradientChangesNothing) {
  auto model = make_model();
  const auto engine = initialize(model, Config::from_text(config_text("cpu", 2)));
  const at::Tensor before = model->parameters()[0].detach().clone();
  const at::Tensor nan = at::full({2, 8}, std::numeric_limits<float>::quiet_NaN());
  (void)engine->backward(model->forward(nan).sum());
  EXPECT_EQ(engine->step(), StepOutcome::kAccumulating);
  (void)engine->backward(model->forward(at::ones({2, 8})).sum());
  EXPECT_EQ(engine->step(), StepOutcome::kSkipped);
  EXPECT_TRUE(at::equal(model->parameters()[0], before));
  EXPECT_EQ(engine->counters().skipped_steps, 1);
  EXPECT_EQ(engine->core().parameter_step(0), 0);
  EXPECT_TRUE(at::equal(engine->core().state(0, "exp_avg"), at::zeros({16, 8})));
}

TEST(Metrics, ReportMeasuredMemory) {
  auto model = make_model();
  const auto engine = initialize(model, Config::from_text(config_text("cpu", 2)));
  EXPECT_THAT(memory_stats_json(engine->core()),
              testing::HasSubstr("\"optimizer states\":{\"current\":4096,\"peak\":4096}"));
  EXPECT_THAT(plan_json(engine->core()), testing::HasSubstr("\"optimizer_home\":\"cpu\""));
  EXPECT_THAT(plan_json(engine->core()), testing::HasSubstr("activations: measured after step 1"));
  for (int i = 0; i < 2; ++i) {
    (void)engine->backward(model->forward(at::ones({2, 8})).pow(2).mean());
    (void)engine->step();
  }
  EXPECT_THAT(plan_json(engine->core()), testing::ContainsRegex("activations: peak .*, measured"));
}

}  // namespace
}  // namespace pannier
