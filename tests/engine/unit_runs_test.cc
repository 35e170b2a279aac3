// Stage 3 from C++: models that are built in shares, and whose parameters are whole only in the units that run.
#include "pannier/engine/unit_runs.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/utils.h>

#include "pannier/base/error.h"
#include "pannier/engine/engine.h"
#include "tests/comm/borrowed.h"
#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 24;
constexpr int kBlocks = 4;
ZeroInit* const kWhole = nullptr;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double shift)
      : up(register_module("up", torch::nn::Linear(kWidth, 2 * kWidth))),
        down(register_module("down", torch::nn::Linear(2 * kWidth, kWidth))) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      parameter.copy_(at::arange(parameter.numel()).sin().mul(0.1).add(shift).reshape(parameter.sizes()));
    }
  }
  // Gives back what it was told beside the sum, as blocks with caches do.
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, double scale) {
    if (fails) {
      throw std::runtime_error("the block fails");
    }
    const at::Tensor middle = up(x).tanh();
    return {x + down(middle) * scale, {middle}};
  }
  torch::nn::Linear up, down;
  bool fails = false;
};
TORCH_MODULE(Block);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(ZeroInit* init, double shift = 0) : blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks->push_back(init == nullptr ? Block(shift) : init->partition(Block(shift)));
      largest_whole = std::max(largest_whole, num_whole());
    }
    scale = register_parameter("scale", at::full({1}, 0.5));
    if (init != nullptr) {
      init->partition(*this);
    }
  }
  // Elements of parameters that have memory.
  std::int64_t num_whole() {
    std::int64_t numel = 0;
    for (const at::Tensor& parameter : parameters()) {
      try {
        (void)parameter.data_ptr();
        numel += parameter.numel();
      } catch (const c10::Error&) {
      }
    }
    return numel;
  }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < kBlocks; ++i) {
      x = std::get<0>(run_unit(block(i), x, 0.5));
      most_whole = std::max(most_whole, num_whole());
    }
    return x * scale;
  }
  Block block(int index) {
    return Block(std::dynamic_pointer_cast<BlockImpl>(blocks[static_cast<std::size_t>(index)]));
  }
  std::vector<std::shared_ptr<torch::nn::Module>> units() { return {blocks->begin(), blocks->end()}; }
  torch::nn::ModuleList blocks;
  at::Tensor scale;
  std::int64_t largest_whole = 0;
  std::int64_t most_whole = 0;
};
TORCH_MODULE(Stack);

std::string config_text(int world, const std::string& zero, const std::string& more = "") {
  return fmt::format(R"({{"train_batch_size": {}, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
      "zero_optimization": {{{}, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1500,
                             "stage3_prefetch_bucket_size": 2500}}{}}})",
                     world, zero, more);
}

const char* const kOffloaded =
    R"("stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"})";

void train(Engine& engine, Stack& model, int steps) {
  for (int i = 0; i < steps; ++i) {
    const at::Tensor x = at::arange(2 * kWidth).reshape({2, kWidth}).add(i).sin();
    (void)engine.backward(run_unit(model, x).pow(2).mean());
    EXPECT_EQ(engine.step(), StepOutcome::kApplied);
  }
}

std::vector<at::Tensor> states(Engine& engine) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < kBlocks * 4 + 1; ++i) {
    result.push_back(engine.core().state(i, "fp32_param"));
    result.push_back(engine.core().state(i, "exp_avg"));
  }
  return result;
}

// What a run without units or ranks comes to.
const std::vector<at::Tensor>& expected() {
  static const std::vector<at::Tensor> result = [] {
    Stack model(kWhole);
    const auto engine = initialize(model, Config::from_text(config_text(1, R"("stage": 0)")));
    train(*engine, model, 3);
    return states(*engine);
  }();
  return result;
}

void expect_close(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(at::allclose(left[i], right[i], 1e-5, 2e-6)) << "state " << i;
  }
}

TEST(UnitRuns, AModelBuiltInSharesTrainsAsAWholeOne) {
  const auto wanted = expected();
  testing::run_ranks(2, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    ZeroInit init(std::make_unique<testing::Borrowed>(communicator));
    Stack model(&init, rank);  // Values are rank 0's.
    EXPECT_EQ(model->num_whole(), 0);
    EXPECT_LE(model->largest_whole, 0);
    try {
      (void)model->scale.item<float>();
      ADD_FAILURE() << "a partitioned parameter was read";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("pannier::ZeroInit has partitioned"));
    }
    const auto engine = initialize(model, Config::from_text(config_text(2, R"("stage": 3)")),
                                   {.units = model->units(), .init = std::move(init)});
    train(*engine, model, 3);
    EXPECT_LT(model->most_whole, 3 * 2 * kWidth * (2 * kWidth + 2));
    const auto found = states(*engine);
    if (rank == 0) {
      expect_close(found, wanted);
    }
  });
}

TEST(UnitRuns, WhatIsPartitionedAndNotTrainedNeedsStage3) {
  testing::run_ranks(2, [&](Communicator& communicator) {
    ZeroInit init(std::make_unique<testing::Borrowed>(communicator));
    Stack model(&init);
    model->scale.set_requires_grad(false);
    EXPECT_THROW((void)initialize(model, Config::from_text(config_text(2, R"("stage": 2)")), {.init = std::move(init)}),
                 ConfigError);
  });
}

TEST(UnitRuns, OffloadedParametersAreWholeInTheUnitsThatRun) {
  Stack model(kWhole);
  const auto engine = initialize(model, Config::from_text(config_text(1, kOffloaded)), {.units = model->units()});
  EXPECT_EQ(model->num_whole(), 0);
  train(*engine, model, 3);
  EXPECT_GT(model->most_whole, 0);
  EXPECT_LT(model->most_whole, 3 * 2 * kWidth * (2 * kWidth + 2));
  expect_close(states(*engine), expected());
}

TEST(UnitRuns, TheNextForwardWaitsUnitByUnitForAnOverlappedStep) {
  Stack model(kWhole);
  const auto engine =
      initialize(model,
                 Config::from_text(config_text(1, R"("stage": 2, "offload_optimizer": {"device": "cpu"})",
                                               R"(, "pannier": {"overlap_step": true})")),
                 {.units = model->units()});
  train(*engine, model, 3);
  expect_close(states(*engine), expected());
}

// The loss is the gradient's size, so that backward goes through the units twice.
std::vector<at::Tensor> after_a_penalty(Engine& engine, Stack& model) {
  for (int i = 0; i < 2; ++i) {
    const at::Tensor x = at::arange(2 * kWidth).reshape({2, kWidth}).add(i).sin().requires_grad_();
    const at::Tensor sum = run_unit(model, x).pow(2).sum();
    const auto gradients = torch::autograd::grad({sum}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    (void)engine.backward(gradients[0].pow(2).mean());
    EXPECT_EQ(engine.step(), StepOutcome::kApplied);
  }
  return states(engine);
}

TEST(UnitRuns, PenaltiesOnGradientsTrain) {
  Stack whole(kWhole);
  const auto plain = initialize(whole, Config::from_text(config_text(1, R"("stage": 0)")));
  Stack model(kWhole);
  const auto engine = initialize(model, Config::from_text(config_text(1, kOffloaded)), {.units = model->units()});
  expect_close(after_a_penalty(*engine, model), after_a_penalty(*plain, whole));
}

TEST(UnitRuns, AUnitThatThrowsIsTakenApartAndTheModelRunsOn) {
  Stack model(kWhole);
  const auto engine = initialize(model, Config::from_text(config_text(1, kOffloaded)), {.units = model->units()});
  train(*engine, model, 1);
  model->block(2)->fails = true;
  EXPECT_THROW((void)run_unit(model, at::ones({2, kWidth})), std::runtime_error);
  EXPECT_EQ(model->num_whole(), 0);
  model->block(2)->fails = false;
  const c10::InferenceMode no_graph;
  EXPECT_EQ(run_unit(model, at::ones({2, kWidth})).numel(), 2 * kWidth);
}

TEST(UnitRuns, ReadingAUnitThatDoesNotRunSaysSo) {
  Stack model(kWhole);
  const auto engine = initialize(model, Config::from_text(config_text(1, kOffloaded)), {.units = model->units()});
  EXPECT_THROW((void)model->block(1)->forward(at::ones({2, kWidth}), 1.0), c10::Error);
}

TEST(UnitRuns, ModulesOfNoEngineJustRun) {
  const at::Tensor x = at::ones({2, kWidth});
  Stack model(kWhole);
  const at::Tensor before = run_unit(model, x);
  (void)initialize(model, Config::from_text(config_text(1, R"("stage": 2)")), {.units = model->units()});
  EXPECT_TRUE(at::equal(run_unit(model, x), before));  // The engine is gone.
  EXPECT_EQ(run_unit(&*model, x).numel(), 2 * kWidth);
}

void expect_refused(const Stack& model, InitializeOptions options, const std::string& message) {
  try {
    (void)initialize(model, Config::from_text(config_text(1, R"("stage": 2)")), std::move(options));
    ADD_FAILURE() << "accepted: " << message;
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

TEST(UnitRuns, UnitsThatCannotBeAreRefused) {
  Stack model(kWhole);
  expect_refused(model, {.units = {nullptr}}, "units[0] is null");
  expect_refused(model, {.units = {model.ptr()}}, "is the model itself");
  expect_refused(model, {.units = {Block(0).ptr()}}, "BlockImpl, is not a part of the model");
  expect_refused(model, {.units = {model->block(0).ptr(), model->block(0).ptr()}}, "is there twice");
  expect_refused(model, {.communicator = make_solo_communicator(), .init = ZeroInit(nullptr)}, "given ranks twice");
  EXPECT_NO_THROW((void)initialize(model, Config::from_text(config_text(1, R"("stage": 2)"))));
}

}  // namespace
}  // namespace pannier
