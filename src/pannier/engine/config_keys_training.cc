// Batch sizes, precision, gradients, optimizer and schedule: the rows outside zero_optimization that training reads.
#include <array>

#include "pannier/engine/config_keys.h"

namespace pannier::config {
namespace {

using enum Kind;
using enum Status;
using enum Auto;

constexpr double kGreatestBatch = 2147483647.0;
constexpr std::string_view kAdam = "adam|adamw";
constexpr std::string_view kTorchAdam = "adam|adamw|sgd|adagrad";
constexpr std::string_view kWarmup = "warmuplr|warmupdecaylr";
constexpr std::string_view kAllWarmup = "warmuplr|warmupdecaylr|warmupcosinelr";
constexpr std::string_view kTotal = "warmupdecaylr|warmupcosinelr";
constexpr std::string_view kCosine = "warmupcosinelr";
constexpr std::string_view kCycle = "onecycle";
constexpr std::string_view kRangeTest = "lrrangetest";

// clang-format off: one row a line reads as the table that it is.
constexpr auto kRows = std::to_array<KeyRow>({
    KeyRow{"train_batch_size", kInteger}.from(1).to(kGreatestBatch).when_auto(kBatch),
    KeyRow{"train_micro_batch_size_per_gpu", kInteger}.from(1).to(kGreatestBatch).when_auto(kBatch),
    KeyRow{"gradient_accumulation_steps", kInteger}.from(1).to(kGreatestBatch).when_auto(kBatch),
    KeyRow{"managed_gradient_accumulation", kBool, kSupported, "true"},
    KeyRow{"dataloader_drop_last", kBool, kSupported, "false"},

    KeyRow{"fp16", kSection},
    KeyRow{"fp16.enabled", kBool, kSupported, "false"}.when_auto(kAlwaysNeeded),
    KeyRow{"fp16.loss_scale", kNumber, kSupported, "0"}.from(0),
    KeyRow{"fp16.initial_scale_power", kInteger, kSupported, "16"}.from(0).to(100),
    KeyRow{"fp16.loss_scale_window", kInteger, kSupported, "1000"}.from(0),
    KeyRow{"fp16.hysteresis", kInteger, kSupported, "2"}.from(0).to(1e6),
    KeyRow{"fp16.consecutive_hysteresis", kBool, kSupported, "false"},
    KeyRow{"fp16.min_loss_scale", kNumber, kSupported, "1"}.from(0),
    KeyRow{"fp16.auto_cast", kBool, kSupported, "false"},
    KeyRow{"fp16.fp16_master_weights_and_grads", kBool, kRefused, "false"},
    KeyRow{"bf16", kSection},
    KeyRow{"bf16.enabled", kBool, kSupported, "false"}.when_auto(kAlwaysNeeded),
    KeyRow{"bf16.check_grad_overflow", kBool, kSupported, "true"},
    KeyRow{"bf16.immediate_grad_update", kBool, kIgnored, "false"},
    KeyRow{"bf16.bf16_master_weights_and_grads", kBool, kRefused, "false"},
    KeyRow{"bf16.bf16_optimizer_states", kBool, kRefused, "false"},
    KeyRow{"torch_autocast", kSection},
    KeyRow{"torch_autocast.enabled", kBool, kRefused, "false"},
    KeyRow{"torch_autocast.dtype", kText, kIgnored},
    KeyRow{"torch_autocast.lower_precision_safe_modules", kAny, kIgnored},
    KeyRow{"amp", kOpaque, kRefused},
    KeyRow{"data_types", kSection},
    KeyRow{"data_types.grad_accum_dtype", kChoice, kSupported, "\"fp32\""}.one_of("fp32|float32|bf16|bfloat16"),
    KeyRow{"data_types.param_dtype", kText, kRefused},
    KeyRow{"data_types.buffer_dtype", kChoice, kSupported}.one_of("fp32|float32|fp16|float16|half|bf16|bfloat16"),

    KeyRow{"gradient_clipping", kNumber, kSupported, "1.0"}.from(0).infinite().when_auto(kAlwaysNeeded),
    KeyRow{"gradient_allreduce_op", kChoice, kSupported, "\"mean\""}.one_of("mean|sum").either_case(),
    KeyRow{"prescale_gradients", kBool, kIgnored, "false"},
    KeyRow{"gradient_predivide_factor", kNumber, kIgnored, "1.0"}.above(0),
    KeyRow{"sparse_gradients", kBool, kRefused, "false"},
    KeyRow{"communication_data_type", kChoice, kIgnored}.one_of("none|fp16|bf16|fp32").either_case(),
    KeyRow{"seq_parallel_communication_data_type", kChoice, kIgnored}.one_of("none|fp16|bf16|fp32").either_case(),
    KeyRow{"disable_allgather", kBool, kRefused, "false"},

    KeyRow{"optimizer", kSection},
    KeyRow{"optimizer.type", kText}.when_auto(kOptimizerNeeds),
    KeyRow{"optimizer.legacy_fusion", kBool, kIgnored, "false"},
    KeyRow{"optimizer.params", kSection},
    KeyRow{"optimizer.params.lr", kNumber}.from(0).when_auto(kOptimizerNeeds),
    KeyRow{"optimizer.params.betas", kBetas}.from(0).below(1).of("adam|adamw|lion"),
    KeyRow{"optimizer.params.eps", kNumber}.from(0).of("adam|adamw|adagrad"),
    KeyRow{"optimizer.params.weight_decay", kNumber}.from(0),
    KeyRow{"optimizer.params.adam_w_mode", kBool, kSupported, "true"}.of(kAdam),
    KeyRow{"optimizer.params.bias_correction", kBool, kSupported, "true"}.of(kAdam),
    KeyRow{"optimizer.params.torch_adam", kBool, kSupported, "false"}.of(kAdam),
    KeyRow{"optimizer.params.amsgrad", kBool, kRefused, "false"}.of("adam|adamw|adagrad"),
    KeyRow{"optimizer.params.fp32_optimizer_states", kBool, kIgnored, "true"}.of("adam|adamw|adagrad|lion"),
    KeyRow{"optimizer.params.momentum", kNumber, kSupported, "0"}.from(0).of("sgd"),
    KeyRow{"optimizer.params.dampening", kNumber, kSupported, "0"}.of("sgd"),
    KeyRow{"optimizer.params.nesterov", kBool, kSupported, "false"}.of("sgd"),
    KeyRow{"optimizer.params.lr_decay", kNumber, kSupported, "0"}.from(0).of("adagrad"),
    KeyRow{"optimizer.params.initial_accumulator_value", kNumber, kSupported, "0"}.from(0).of("adagrad"),
    KeyRow{"optimizer.params.maximize", kBool, kRefused, "false"}.of(kTorchAdam),
    KeyRow{"optimizer.params.foreach", kBool, kIgnored}.of(kTorchAdam),
    KeyRow{"optimizer.params.fused", kBool, kIgnored}.of(kTorchAdam),
    KeyRow{"optimizer.params.capturable", kBool, kIgnored, "false"}.of(kAdam),
    KeyRow{"optimizer.params.differentiable", kBool, kRefused, "false"}.of(kTorchAdam),
    KeyRow{"optimizer.params.set_grad_none", kBool, kIgnored, "true"}.of("adam|adamw|lion"),
    KeyRow{"zero_allow_untested_optimizer", kBool, kIgnored, "false"},
    KeyRow{"zero_force_ds_cpu_optimizer", kBool, kIgnored, "true"},

    KeyRow{"scheduler", kSection},
    KeyRow{"scheduler.type", kText}.when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params", kSection},
    KeyRow{"scheduler.params.last_batch_iteration", kInteger, kSupported, "-1"}.from(-1),
    KeyRow{"scheduler.params.warmup_min_lr", kPerGroup, kSupported, "0"}.from(0).of(kWarmup),
    KeyRow{"scheduler.params.warmup_max_lr", kPerGroup}.from(0).of(kWarmup),
    KeyRow{"scheduler.params.warmup_num_steps", kInteger, kSupported, "1000"}.from(0).of(kAllWarmup).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.warmup_type", kChoice, kSupported, "\"log\""}.one_of("log|linear").of(kAllWarmup),
    KeyRow{"scheduler.params.total_num_steps", kInteger}.from(1).of(kTotal).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.warmup_min_ratio", kNumber, kSupported, "0"}.from(0).to(1).of(kCosine),
    KeyRow{"scheduler.params.cos_min_ratio", kNumber, kSupported, "0.0001"}.from(0).to(1).of(kCosine),
    KeyRow{"scheduler.params.cycle_min_lr", kPerGroup}.from(0).of(kCycle).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.cycle_max_lr", kPerGroup}.from(0).of(kCycle).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.decay_lr_rate", kNumber, kSupported, "0"}.from(0).of(kCycle),
    KeyRow{"scheduler.params.cycle_first_step_size", kNumber, kSupported, "2000"}.above(0).of(kCycle).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.cycle_second_step_size", kNumber}.from(0).of(kCycle).when_auto(kScheduleNeeds),
    KeyRow{"scheduler.params.cycle_first_stair_count", kInteger, kSupported, "0"}.from(0).of(kCycle),
    KeyRow{"scheduler.params.cycle_second_stair_count", kInteger}.from(0).of(kCycle),
    KeyRow{"scheduler.params.decay_step_size", kNumber, kSupported, "0"}.from(0).of(kCycle),
    KeyRow{"scheduler.params.cycle_momentum", kBool, kSupported, "true"}.of(kCycle),
    KeyRow{"scheduler.params.cycle_min_mom", kPerGroup, kSupported, "0.8"}.from(0).of(kCycle),
    KeyRow{"scheduler.params.cycle_max_mom", kPerGroup, kSupported, "0.9"}.from(0).of(kCycle),
    KeyRow{"scheduler.params.decay_mom_rate", kNumber, kSupported, "0"}.of(kCycle),
    KeyRow{"scheduler.params.lr_range_test_min_lr", kPerGroup, kSupported, "0.001"}.from(0).of(kRangeTest),
    KeyRow{"scheduler.params.lr_range_test_step_size", kInteger, kSupported, "2000"}.from(1).of(kRangeTest),
    KeyRow{"scheduler.params.lr_range_test_step_rate", kNumber, kSupported, "1.0"}.from(0).of(kRangeTest),
    KeyRow{"scheduler.params.lr_range_test_staircase", kBool, kSupported, "false"}.of(kRangeTest),
});
// clang-format on

}  // namespace

std::span<const KeyRow> training_keys() { return kRows; }

}  // namespace pannier::config
