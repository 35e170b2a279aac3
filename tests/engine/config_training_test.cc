#include <gmock/gmock.h>

#include <string>

#include "tests/engine/config_text.h"

namespace pannier {
namespace {

using kernels::Algorithm;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

OptimizerConfig optimizer(const std::string& type, const std::string& params = "{}") {
  return Config::from_text("{\"optimizer\": {\"type\": \"" + type + "\", \"params\": " + params + "}}")
      .optimizer.value();
}

SchedulerConfig scheduler(const std::string& type, const std::string& params = "{}") {
  return Config::from_text("{\"scheduler\": {\"type\": \"" + type + "\", \"params\": " + params + "}}")
      .scheduler.value();
}

TEST(Precision, BuffersAndInputsFollowOnRequest) {
  EXPECT_FALSE(Config::from_text(R"({"fp16": {"enabled": true}})").cast_inputs);
  EXPECT_TRUE(Config::from_text(R"({"fp16": {"enabled": true, "auto_cast": true}})").cast_inputs);
  EXPECT_FALSE(Config::from_text(R"({"data_types": {}})").buffer_dtype.has_value());
  for (const auto& [text, dtype] :
       {std::pair{"half", Dtype::kFp16}, std::pair{"float32", Dtype::kFp32}, std::pair{"bf16", Dtype::kBf16}}) {
    const std::string config = std::string(R"({"data_types": {"buffer_dtype": ")") + text + "\"}}";
    EXPECT_EQ(Config::from_text(config).buffer_dtype, dtype) << text;
  }
}

TEST(Optimizer, AdamIsAdamWUnlessToldOtherwise) {
  EXPECT_EQ(optimizer("Adam").algorithm, Algorithm::kAdamW);
  EXPECT_EQ(optimizer("AdamW").algorithm, Algorithm::kAdamW);
  EXPECT_EQ(optimizer("Adam", R"({"adam_w_mode": false})").algorithm, Algorithm::kAdam);
  EXPECT_EQ(optimizer("AdamW", R"({"adam_w_mode": false})").algorithm, Algorithm::kAdamW);
  EXPECT_EQ(optimizer("Adam").hyper.weight_decay, 0);
  EXPECT_EQ(optimizer("AdamW").hyper.weight_decay, 0);
}

TEST(Optimizer, IsNotedWhereItIsNotWhatItSays) {
  const auto notes = [](const std::string& type, const std::string& params) {
    return notes_of(R"({"optimizer": {"type": ")" + type + R"(", "params": )" + params + "}}");
  };
  EXPECT_THAT(notes("Adam", "{}"), HasSubstr("optimizer.type \"Adam\" is AdamW (decoupled decay)"));
  EXPECT_THAT(notes("adamw", R"({"adam_w_mode": false})"),
              HasSubstr("adam_w_mode false is ignored: optimizer.type \"adamw\" is AdamW"));
  for (const char* params : {R"({"adam_w_mode": false})", R"({"adam_w_mode": true, "weight_decay": 0.1})"}) {
    EXPECT_EQ(notes("Adam", params), "") << params;
  }
  for (const char* params : {"{}", R"({"weight_decay": 0.1})", R"({"adam_w_mode": true})"}) {
    EXPECT_EQ(notes("AdamW", params), "") << params;
  }
}

TEST(Optimizer, TorchAdamDecaysAsTorchDoes) {
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true})").hyper.weight_decay, 0.01);
  EXPECT_EQ(optimizer("Adam", R"({"torch_adam": true, "adam_w_mode": false})").hyper.weight_decay, 0);
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true, "weight_decay": 0, "fused": true, "foreach": false})")
                .hyper.weight_decay,
            0);
}

TEST(Optimizer, HasThePeersDefaults) {
  const OptimizerConfig adam = optimizer("adamw");
  EXPECT_EQ(adam.type, "adamw");
  EXPECT_EQ(adam.hyper.lr, 1e-3);
  EXPECT_EQ(adam.hyper.beta1, 0.9);
  EXPECT_EQ(adam.hyper.beta2, 0.999);
  EXPECT_EQ(adam.hyper.eps, 1e-8);
  EXPECT_TRUE(adam.hyper.bias_correction);
  EXPECT_EQ(optimizer("Lion").hyper.beta2, 0.999);
  EXPECT_EQ(optimizer("Adagrad").hyper.lr, 1e-2);
  EXPECT_EQ(optimizer("Adagrad").hyper.eps, 1e-10);
  EXPECT_EQ(optimizer("SGD").hyper.lr, 1e-3);
  EXPECT_EQ(optimizer("SGD").hyper.momentum, 0);
  EXPECT_EQ(Config::from_text(R"({"optimizer": {"type": "AdamW"}})").optimizer->hyper.lr, 1e-3);
}

TEST(Optimizer, ReadsEveryField) {
  const OptimizerConfig adam = optimizer(
      "AdamW", R"({"lr": 0.5, "betas": [0.8, 0.9], "eps": 1, "weight_decay": 0.1, "bias_correction": false})");
  EXPECT_EQ(adam.hyper.lr, 0.5);
  EXPECT_EQ(adam.hyper.beta1, 0.8);
  EXPECT_EQ(adam.hyper.beta2, 0.9);
  EXPECT_EQ(adam.hyper.eps, 1);
  EXPECT_EQ(adam.hyper.weight_decay, 0.1);
  EXPECT_FALSE(adam.hyper.bias_correction);
  const OptimizerConfig sgd = optimizer("sgd", R"({"momentum": 0.9, "nesterov": true})");
  EXPECT_EQ(sgd.algorithm, Algorithm::kSgd);
  EXPECT_EQ(sgd.hyper.momentum, 0.9);
  EXPECT_TRUE(sgd.hyper.nesterov);
  EXPECT_EQ(optimizer("SGD", R"({"dampening": 0.5})").hyper.dampening, 0.5);
  const OptimizerConfig adagrad = optimizer("Adagrad", R"({"lr_decay": 0.1, "initial_accumulator_value": 2})");
  EXPECT_EQ(adagrad.algorithm, Algorithm::kAdagrad);
  EXPECT_EQ(adagrad.hyper.lr_decay, 0.1);
  EXPECT_EQ(adagrad.initial_accumulator_value, 2);
  EXPECT_EQ(optimizer("LION").algorithm, Algorithm::kLion);
}

TEST(Optimizer, RefusesOtherTypesWithTheList) {
  const auto message = [](const char* type) {
    return error_of(std::string(R"({"optimizer": {"type": ")") + type +
                    R"(", "params": {"lr": 1, "ns_method": "x"}}})");
  };
  const char* list = "supported are Adam, AdamW, SGD, Adagrad, Lion";
  for (const char* type : {"Muon", "Lamb", "OneBitAdam", "ZeroOneAdam", "RMSprop"}) {
    EXPECT_THAT(message(type), AllOf(HasSubstr("known, but not supported by this version"), HasSubstr(list)));
  }
  EXPECT_EQ(message("Adamm"),
            std::string("configuration: optimizer.type: \"Adamm\" is not an optimizer that Pannier knows; ") + list);
}

TEST(Optimizer, NeedsATypeAndSoundValues) {
  EXPECT_THAT(error_of(R"({"optimizer": {"params": {"lr": 1}}})"), HasSubstr("optimizer.type: not given"));
  EXPECT_EQ(error_of(R"({"optimizer": {}})"), "accepted");
  EXPECT_THAT(
      error_of(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})"),
      HasSubstr("optimizer.params.nesterov: needs a momentum above 0 and a dampening of 0, but they are 0 and 0"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "AdamW", "params": {"weight_decay": -1}}})"),
              HasSubstr("optimizer.params.weight_decay"));
}

TEST(Scheduler, ReadsEveryType) {
  const SchedulerConfig warmup = scheduler("WarmupLR", R"({"warmup_min_lr": [0, 0.1], "warmup_num_steps": 0})");
  EXPECT_EQ(warmup.type, ScheduleType::kWarmupLr);
  EXPECT_THAT(warmup.options.warmup_min_lr.values, ElementsAre(0, 0.1));
  EXPECT_TRUE(warmup.options.warmup_min_lr.is_list);
  EXPECT_FALSE(warmup.options.warmup_max_lr.given());
  EXPECT_EQ(warmup.options.warmup_num_steps, 0);
  EXPECT_EQ(warmup.options.warmup_type, WarmupCurve::kLog);
  const SchedulerConfig decay = scheduler("WarmupDecayLR", R"({"total_num_steps": 6, "warmup_type": "linear"})");
  EXPECT_EQ(decay.options.total_num_steps, 6);
  EXPECT_EQ(decay.options.warmup_type, WarmupCurve::kLinear);
  const SchedulerConfig cosine =
      scheduler("WarmupCosineLR", R"({"total_num_steps": 6, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2})");
  EXPECT_EQ(cosine.options.cos_min_ratio, 0.1);
  EXPECT_EQ(cosine.options.warmup_min_ratio, 0.2);
  const SchedulerConfig cycle = scheduler("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 1,
      "cycle_second_step_size": 5, "cycle_second_stair_count": 2, "cycle_momentum": false, "decay_step_size": 3})");
  EXPECT_EQ(cycle.options.cycle_first_step_size, 2000);
  EXPECT_EQ(cycle.options.cycle_second_step_size, 5);
  EXPECT_EQ(cycle.options.cycle_second_stair_count, 2);
  EXPECT_FALSE(cycle.options.cycle_momentum);
  EXPECT_EQ(cycle.options.decay_step_size, 3);
  const SchedulerConfig range = scheduler("LRRangeTest", R"({"lr_range_test_staircase": true})");
  EXPECT_TRUE(range.options.lr_range_test_staircase);
  EXPECT_THAT(range.options.lr_range_test_min_lr.values, ElementsAre(1e-3));
}

TEST(Scheduler, BuildsASchedule) {
  const SchedulerConfig config = scheduler("WarmupLR", R"({"warmup_num_steps": 2, "warmup_type": "linear"})");
  Schedule schedule(config.type, config.options, {0.1, 7.0, 0.2});
  schedule.step_to(1);
  EXPECT_THAT(schedule.lrs(), ElementsAre(0.05, 3.5, 0.1));
}

TEST(Scheduler, NeedsWhatItsTypeNeeds) {
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupDecayLR"}})"),
              HasSubstr("scheduler.params.total_num_steps: WarmupDecayLR needs it"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": null}}})"),
              AllOf(HasSubstr("cycle_min_lr: OneCycle needs it"), HasSubstr("cycle_max_lr: OneCycle needs it")));
  EXPECT_THAT(error_of(R"({"scheduler": {"params": {"warmup_num_steps": 2}}})"),
              HasSubstr("scheduler.type: not given"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "StepLR", "params": {"gamma": 2}}})"),
              HasSubstr("scheduler.type: unknown schedule 'StepLR'; known are WarmupLR, WarmupDecayLR"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}})"),
              HasSubstr("wanted one of \"log\", \"linear\", got \"cubic\""));
}

TEST(Precision, ReadsTheLossScale) {
  const Config config = Config::from_text(R"({"fp16": {"enabled": true, "loss_scale_window": 2, "hysteresis": 1,
      "consecutive_hysteresis": true, "min_loss_scale": 0.5}})");
  EXPECT_EQ(config.dtype, Dtype::kFp16);
  EXPECT_TRUE(config.loss_scale.is_dynamic());
  EXPECT_EQ(config.loss_scale.initial_scale_power, 16);
  EXPECT_EQ(config.loss_scale.loss_scale_window, 2);
  EXPECT_EQ(config.loss_scale.hysteresis, 1);
  EXPECT_TRUE(config.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(config.loss_scale.min_loss_scale, 0.5);
  EXPECT_EQ(LossScaler(config.effective_loss_scale()).scale(), 65536);
  EXPECT_EQ(Config::from_text(R"({"fp16": {"enabled": true, "loss_scale": 128}})").loss_scale.static_scale, 128);
  const Config bf16 = Config::from_text(R"({"bf16": {"enabled": true}, "fp16": {"loss_scale": 8}})");
  EXPECT_EQ(LossScaler(bf16.effective_loss_scale()).scale(), 1);
}

TEST(Precision, ChecksTheLossScaleWhereItIsUsed) {
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true, "loss_scale_window": 0}})"),
              HasSubstr("fp16.loss_scale_window must be positive, got 0"));
  EXPECT_EQ(error_of(R"({"fp16": {"enabled": false, "loss_scale_window": 0}})"), "accepted");
  EXPECT_EQ(error_of(R"({"fp16": {"enabled": true, "loss_scale": 8, "loss_scale_window": 0}})"), "accepted");
}

TEST(Precision, RefusesTwoModes) {
  EXPECT_THAT(error_of(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("fp16 and bf16 can't both be on"));
  EXPECT_EQ(Config::from_text(R"({"bfloat16": {"enabled": true}})").dtype, Dtype::kBf16);
}

TEST(Precision, ChecksOverflowUnlessBf16SaysNot) {
  EXPECT_FALSE(Config::from_text(R"({"bf16": {"enabled": true, "check_grad_overflow": false}})").check_grad_overflow);
  EXPECT_TRUE(Config::from_text(R"({"bf16": {"enabled": true}})").check_grad_overflow);
}

TEST(Precision, AccumulatesInBf16OnlyOnRequest) {
  const auto accumulation = [](const char* dtype) {
    return Config::from_text(std::string(R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": )") + dtype +
                             "}}")
        .grad_accum_dtype;
  };
  EXPECT_EQ(accumulation("\"bf16\""), Dtype::kBf16);
  EXPECT_EQ(accumulation("\"bfloat16\""), Dtype::kBf16);
  EXPECT_EQ(accumulation("\"fp32\""), Dtype::kFp32);
  EXPECT_EQ(accumulation("null"), Dtype::kFp32);
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "bf16"}})"),
              HasSubstr("data_types.grad_accum_dtype: \"bf16\" needs bf16.enabled, but the parameters are fp32"));
  EXPECT_THAT(error_of(R"({"data_types": {"grad_accum_dtype": "fp16"}})"), HasSubstr("got \"fp16\""));
}

}  // namespace
}  // namespace pannier
