#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "pannier/base/error.h"
#include "pannier/engine/engine.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::HasSubstr;

constexpr const char* kConfig = R"({"train_batch_size": 2, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})";

struct Training {
  torch::nn::Sequential model{torch::nn::Linear(8, 16), torch::nn::Linear(16, 1)};
  std::unique_ptr<Engine> engine = initialize(model, Config::from_text(kConfig));

  void step() {
    engine->begin_unit(0);
    const at::Tensor x = at::randn({2, 8}).to(at::kBFloat16);
    (void)engine->backward(model->forward(x).to(at::kFloat).pow(2).mean());
    (void)engine->step();
  }
  [[nodiscard]] std::vector<at::Tensor> states() {
    std::vector<at::Tensor> states;
    for (int i = 0; i < 4; ++i) {
      for (const auto* name : {"fp32_param", "exp_avg", "exp_avg_sq"}) {
        states.push_back(engine->core().state(i, name));
      }
    }
    return states;
  }
};

TEST(EngineCheckpoint, ResumesAsIfNeverInterrupted) {
  const TemporaryFolder folder;
  torch::manual_seed(3);
  Training first;
  first.step();
  first.step();
  EXPECT_EQ(first.engine->save_checkpoint(folder.path(), "", {{"epoch", "4"}}), folder.path() + "/global_step2");
  first.step();

  torch::manual_seed(77);
  Training second;
  const auto loaded = second.engine->load_checkpoint({.folder = folder.path(), .tag = ""});
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->attributes.at("epoch"), "4");
  EXPECT_EQ(second.engine->counters().global_steps, 2);
  second.step();
  EXPECT_EQ(first.engine->lrs(), second.engine->lrs());
  const auto expected = first.states();
  const auto actual = second.states();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], actual[i])) << i;
  }
}

TEST(EngineCheckpoint, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  Training run;
  EXPECT_FALSE(run.engine->load_checkpoint({.folder = folder.path(), .tag = ""}));
  EXPECT_THROW((void)run.engine->load_checkpoint({.folder = folder.path(), .tag = "none"}), IoError);
}

}  // namespace
}  // namespace pannier
