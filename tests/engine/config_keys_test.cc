#include "pannier/engine/config_keys.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "pannier/engine/config_values.h"
#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Row {
  const char* text;
  const char* message;
};

void expect_refused(std::initializer_list<Row> rows) {
  for (const Row& row : rows) {
    EXPECT_THAT(error_of(row.text), HasSubstr(row.message)) << row.text;
  }
}

TEST(UnknownKeys, NameThePathAndTheNearestKey) {
  expect_refused({
      {R"({"zero_optimisation": {"stage": 2}})", "zero_optimisation: unknown key; did you mean zero_optimization?"},
      {R"({"zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}})",
       "zero_optimization.offload_optimzer: unknown key; did you mean zero_optimization.offload_optimizer?"},
      {R"({"offload_optimizer": {"device": "cpu"}})",
       "offload_optimizer: unknown key; did you mean zero_optimization.offload_optimizer?"},
      {R"({"fp16": {"enabled": true, "loss_scal": 8}})", "fp16.loss_scal: unknown key; did you mean fp16.loss_scale?"},
      {R"({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}})",
       "optimizer.params.learning_rate: unknown key; did you mean optimizer.params.lr?"},
      {R"({"stage": 2})", "stage: unknown key; did you mean zero_optimization.stage?"},
      {R"({"pannier": {"qqqqqqqqqqqq": 2}})",
       "pannier.qqqqqqqqqqqq: unknown key; pannier has device, device_memory, host_memory"},
      {R"({"qqqqqqqqqqqqqqqqqq": 2})", "qqqqqqqqqqqqqqqqqq: unknown key"},
      {R"({"zero_optimization": {"offload_param": {"stage3_prefetch_bucket_size": 1}}})",
       "did you mean zero_optimization.stage3_prefetch_bucket_size?"},
  });
}

TEST(UnknownKeys, AreAllSaidAtOnce) {
  const std::string message =
      error_of(R"({"zero_optimisation": {}, "fp16": {"enabled": "false", "loss_scal": 8}, "train_batchsize": 8})");
  EXPECT_THAT(message, AllOf(HasSubstr("configuration: 4 errors\n"), HasSubstr("\n  zero_optimisation: "),
                             HasSubstr("\n  fp16.loss_scal: "), HasSubstr("\n  train_batchsize: "),
                             HasSubstr("\n  fp16.enabled: wanted true or false, got \"false\"")));
}

TEST(UnknownKeys, BecomeNotesOnRequest) {
  const char* text = R"({"zero_optimisation": {}, "pannier": {"unknown_keys": "warn"}})";
  EXPECT_THAT(notes_of(text), HasSubstr("zero_optimisation: unknown key; did you mean zero_optimization?"));
  EXPECT_THAT(error_of(R"({"zero_optimisation": {}, "fp16": 1, "pannier": {"unknown_keys": "warn"}})"),
              AllOf(HasSubstr("fp16: wanted an object, got 1"), Not(HasSubstr("zero_optimisation"))));
}

TEST(UnknownKeys, KnowWhichOptimizerAKeyBelongsTo) {
  expect_refused({
      {R"({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}})",
       "optimizer.params.momentum: not a parameter of AdamW; it belongs to sgd"},
      {R"({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}})",
       "not a parameter of SGD; it belongs to adam, adamw, lion"},
      {R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}})", "not a parameter of WarmupLR"},
      {R"({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}})", "did you mean gradient_clipping?"},
      {R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 1, "total_num_steps": 9}}})",
       "did you mean scheduler.params.warmup_num_steps?"},
  });
}

TEST(UnsupportedKeys, AreNotedWhereTheyAreOff) {
  for (const char* text : {
           R"({"flops_profiler": {"enabled": false}})",
           R"({"amp": {"enabled": false, "opt_level": "O1"}})",
           R"({"tensorboard": {"enabled": "auto", "output_path": "x"}})",
           R"({"compile": {"deepcompile": false, "double_buffer": true}})",
           R"({"tensor_parallel": {"autotp_size": 1}})",
           R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false, "x": 5}}}})",
           R"({"elasticity": {}})",
           R"({"hybrid_engine": false})",
           R"({"sparse_gradients": false})",
           R"({"sequence_parallel_size": 1})",
           R"({"zero_optimization": {"mics_shard_size": 0}})",
           R"({"zero_optimization": {"zenflow": false}})",
           R"({"bf16": {"bf16_optimizer_states": false}})",
       }) {
    EXPECT_THAT(notes_of(text), HasSubstr("not supported, and off: ")) << text;
  }
  EXPECT_THAT(notes_of(R"({"flops_profiler": {"enabled": false}})"), HasSubstr("flops_profiler.enabled"));
}

TEST(UnsupportedKeys, AreErrorsWhereTheyAreOn) {
  for (const char* text : {
           R"({"flops_profiler": {"enabled": true}})",
           R"({"amp": {"enabled": true, "opt_level": "O1"}})",
           R"({"tensorboard": {"enabled": true}})",
           R"({"wandb": {"team": "x"}})",
           R"({"compile": {"deepcompile": true}})",
           R"({"tensor_parallel": {"autotp_size": 4}})",
           R"({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}})",
           R"({"autotuning": {"a": {"b": [1]}}})",
           R"({"hybrid_engine": true})",
           R"({"sparse_gradients": true})",
           R"({"sequence_parallel_size": 2})",
           R"({"weight_quantization": {}})",
           R"({"data_types": {"param_dtype": "bf16"}})",
           R"({"zero_optimization": {"mics_shard_size": 8}})",
           R"({"zero_optimization": {"zenflow": {}}})",
           R"({"zero_optimization": {"load_from_fp32_weights": false}})",
           R"({"bf16": {"bf16_optimizer_states": true}})",
           R"({"optimizer": {"type": "AdamW", "params": {"amsgrad": true}}})",
           R"({"activation_checkpointing": {"cpu_checkpointing": true}})",
       }) {
    EXPECT_THAT(error_of(text), HasSubstr("not supported; turn it off or remove it")) << text;
  }
}

TEST(IgnoredKeys, AreCheckedAndNoted) {
  EXPECT_THAT(
      notes_of(R"({"zero_optimization": {"overlap_comm": true, "contiguous_gradients": true},
                           "prescale_gradients": true, "communication_data_type": "FP32", "pipeline": {"stages": 2}})"),
      HasSubstr("accepted, without effect here: zero_optimization.overlap_comm, "
                "zero_optimization.contiguous_gradients, prescale_gradients, communication_data_type, pipeline"));
  EXPECT_THAT(error_of(R"({"zero_optimization": {"overlap_comm": "true"}})"), HasSubstr("wanted true or false"));
}

TEST(UnusedKeys, AreCheckedAndNotedWhereTheyAskForSomething) {
  EXPECT_THAT(notes_of(R"({"wall_clock_breakdown": true,
                           "steps_per_print": 10, "checkpoint": {"tag_validation": "fail"},
                           "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9,
                                                 "offload_optimizer": {"device": "cpu", "pin_memory": true}}})"),
              AllOf(HasSubstr("accepted, but this version does nothing with: "), HasSubstr("wall_clock_breakdown"),
                    HasSubstr("steps_per_print"), HasSubstr("zero_optimization.stage3_max_live_parameters"),
                    HasSubstr("zero_optimization.offload_optimizer.pin_memory")));
  EXPECT_EQ(notes_of(R"({"wall_clock_breakdown": false, "dump_state": false, "steps_per_print": Infinity,
                         "pannier": {"threads": 0}, "zero_optimization": {"offload_param": {"pin_memory": false}}})"),
            "");
  EXPECT_THAT(error_of(R"({"pannier": {"threads": -1}})"), HasSubstr("pannier.threads"));
  EXPECT_EQ(Config::from_text(R"({"pannier": {"threads": 4}})").pannier.threads, 4);
}

TEST(KeyTypes, NamePathWantedAndValue) {
  expect_refused({
      {R"({"fp16": {"enabled": "false"}})", "fp16.enabled: wanted true or false, got \"false\""},
      {R"({"fp16": {"enabled": 2}})", "fp16.enabled: wanted true or false, got 2"},
      {R"({"zero_optimization": {"reduce_bucket_size": 0}})",
       "zero_optimization.reduce_bucket_size: wanted a whole number of at least 1, got 0"},
      {R"({"zero_optimization": {"reduce_bucket_size": -1}})", "of at least 1, got -1"},
      {R"({"zero_optimization": {"reduce_bucket_size": 0.9}})", "of at least 1, got 0.9"},
      {R"({"zero_optimization": {"reduce_bucket_size": "5e8"}})", "got \"5e8\""},
      {R"({"zero_optimization": {"reduce_bucket_size": 1e19}})", "got 1e+19"},
      {R"({"zero_optimization": {"reduce_bucket_size": 18446744073709551615}})", "got 18446744073709551615"},
      {R"({"zero_optimization": {"stage": 4}})", "zero_optimization.stage: wanted a whole number from 0 to 3, got 4"},
      {R"({"zero_optimization": {"stage": "2"}})", "got \"2\""},
      {R"({"zero_optimization": {"stage": true}})", "got true"},
      {R"({"zero_optimization": {"stage": 1.5}})", "got 1.5"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}})",
       "zero_optimization.offload_optimizer.device: wanted one of \"none\", \"cpu\", \"nvme\", got \"gpu\""},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "CPU"}}})", "got \"CPU\""},
      {R"({"zero_optimization": {"offload_optimizer": {"device": 3}}})", "got 3"},
      {R"({"zero_optimization": {"offload_optimizer": "cpu"}})", "wanted an object, got \"cpu\""},
      {R"({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}})", "wanted a number from 0 to 1, got 1.5"},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": "3e-4"}}})",
       "optimizer.params.lr: wanted a number of at least 0, got \"3e-4\""},
      {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}})",
       "optimizer.params.betas: wanted two numbers from 0 to less than 1, got [0.9]"},
      {R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 1.0]}}})", "got [0.9,1.0]"},
      {R"({"gradient_clipping": -1})", "gradient_clipping: wanted a number of at least 0, got -1"},
      {R"({"train_micro_batch_size_per_gpu": 1.5})",
       "train_micro_batch_size_per_gpu: wanted a whole number from 1 to 2147483647, got 1.5"},
      {R"({"train_batch_size": 0})", "train_batch_size: wanted a whole number from 1 to 2147483647, got 0"},
      {R"({"gradient_predivide_factor": 0})", "wanted a number above 0, got 0"},
      {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": ["a"]}}})",
       "wanted a number of at least 0, or a list with one a parameter group, got [\"a\"]"},
      {R"({"optimizer": {"type": 3}})", "optimizer.type: wanted a text, got 3"},
      {R"({"fp16": {"initial_scale_power": 3000}})", "from 0 to 100, got 3000"},
  });
}

TEST(KeyTypes, TakeOneAndZeroAsBooleans) {
  EXPECT_EQ(Config::from_text(R"({"fp16": {"enabled": 1}})").dtype, Dtype::kFp16);
  EXPECT_EQ(Config::from_text(R"({"fp16": {"enabled": 0}})").dtype, Dtype::kFp32);
}

TEST(KeyTypes, TakeWholeFloatsAsIntegers) {
  EXPECT_EQ(Config::from_text(R"({"zero_optimization": {"reduce_bucket_size": 5e8}})").zero.bucket_numel, 500'000'000);
  EXPECT_EQ(Config::from_text(R"({"zero_optimization": {"reduce_bucket_size": 1}})").zero.bucket_numel, 1);
  EXPECT_EQ(Config::from_text(R"({"train_batch_size": 8.0})").train_batch_size, 8);
}

TEST(KeyTypes, ShortenLongValues) {
  EXPECT_THAT(error_of(R"({"fp16": ")" + std::string(500, 'x') + R"("})"), HasSubstr("xxx..."));
}

TEST(KeyTable, HasEveryPathOnce) {
  std::set<std::string_view> paths;
  for (const config::KeyRow* row : config::all_keys()) {
    EXPECT_TRUE(paths.insert(row->path).second) << row->path;
  }
  for (const config::Alias& alias : config::aliases()) {
    EXPECT_TRUE(paths.insert(alias.written).second) << alias.written;
    EXPECT_NE(config::find_key(alias.meant), nullptr) << alias.meant;
  }
}

TEST(KeyTable, HasASectionAroundEveryKey) {
  for (const config::KeyRow* row : config::all_keys()) {
    const std::size_t dot = row->path.rfind('.');
    if (dot != std::string_view::npos) {
      const config::KeyRow* section = config::find_key(row->path.substr(0, dot));
      ASSERT_NE(section, nullptr) << row->path;
      EXPECT_EQ(section->kind, config::Kind::kSection) << row->path;
    }
  }
}

TEST(KeyTable, HasDefaultsThatFit) {
  for (const config::KeyRow* row : config::all_keys()) {
    if (row->standard != "-") {
      std::string wanted;
      bool rounded = false;
      EXPECT_TRUE(config::convert(*row, config::Json::parse(row->standard), wanted, rounded)) << row->path;
      EXPECT_FALSE(rounded) << row->path;
    }
  }
}

TEST(KeyTable, IsWhatToolsSee) {
  const std::vector<ConfigKey> keys = config_keys();
  EXPECT_EQ(keys.size(), config::all_keys().size() + config::aliases().size());
  EXPECT_EQ(keys.front().path, "train_batch_size");
  EXPECT_EQ(keys.back().status, "alias");
}

}  // namespace
}  // namespace pannier
