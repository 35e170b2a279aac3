// The resolved configuration as JSON, in the shape that it is read in.
#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "pannier/engine/config.h"

namespace pannier {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
void put_if(Json& object, const char* key, const std::optional<T>& value) {
  if (value) {
    object[key] = *value;
  }
}

void put_batch(Json& root, const char* key, const std::optional<std::int64_t>& value, bool is_auto) {
  put_if(root, key, value);
  if (is_auto) {
    root[key] = "auto";
  }
}

Json per_group(const PerGroup& value) { return value.is_list ? Json(value.values) : Json(value.values.front()); }

void put_per_group(Json& object, const char* key, const PerGroup& value) {
  if (value.given()) {
    object[key] = per_group(value);
  }
}

Json zero_json(const Zero& zero) {
  Json optimizer = {{"device", to_string(zero.optimizer_home)},
                    {"pin_memory", zero.pin_memory},
                    {"ratio", zero.ratio},
                    {"buffer_count", zero.buffer_count},
                    {"buffer_size", zero.buffer_nbytes}};
  Json param = {{"device", to_string(zero.param_home)},
                {"pin_memory", zero.pin_memory},
                {"buffer_count", zero.param_buffer_count},
                {"buffer_size", zero.param_buffer_numel},
                {"max_in_cpu", zero.param_max_in_host_numel}};
  const auto path = [](const std::vector<std::string>& paths) {
    return paths.empty() ? Json(nullptr) : paths.size() == 1 ? Json(paths.front()) : Json(paths);
  };
  optimizer["nvme_path"] = path(zero.optimizer_nvme_paths);
  param["nvme_path"] = path(zero.param_nvme_paths);
  Json json = {{"stage", zero.stage},
               {"offload_optimizer", optimizer},
               {"offload_param", param},
               {"reduce_bucket_size", zero.bucket_numel},
               {"zero_hpz_partition_size", zero.node_size},
               {"ignore_unused_parameters", zero.ignore_unused_parameters},
               {"stage3_gather_16bit_weights_on_model_save", zero.gather_16bit_weights_on_model_save}};
  put_if(json, "stage3_prefetch_bucket_size", zero.prefetch_bucket_numel);
  put_if(json, "stage3_param_persistence_threshold", zero.param_persistence_numel);
  put_if(json, "stage3_max_live_parameters", zero.max_live_numel);
  put_if(json, "stage3_max_reuse_distance", zero.max_reuse_distance_numel);
  return json;
}

Json optimizer_json(const OptimizerConfig& optimizer) {
  using kernels::Algorithm;
  const kernels::Hyperparameters& hyper = optimizer.hyper;
  Json params = {{"lr", hyper.lr}, {"weight_decay", hyper.weight_decay}};
  switch (optimizer.algorithm) {
    case Algorithm::kAdam:
    case Algorithm::kAdamW:
      params["betas"] = {hyper.beta1, hyper.beta2};
      params["eps"] = hyper.eps;
      params["bias_correction"] = hyper.bias_correction;
      params["adam_w_mode"] = optimizer.algorithm == Algorithm::kAdamW;
      break;
    case Algorithm::kLion:
      params["betas"] = {hyper.beta1, hyper.beta2};
      break;
    case Algorithm::kSgd:
      params["momentum"] = hyper.momentum;
      params["dampening"] = hyper.dampening;
      params["nesterov"] = hyper.nesterov;
      break;
    case Algorithm::kAdagrad:
      params["eps"] = hyper.eps;
      params["lr_decay"] = hyper.lr_decay;
      params["initial_accumulator_value"] = optimizer.initial_accumulator_value;
      break;
  }
  return {{"type", optimizer.type}, {"params", params}};
}

void put_warmup(Json& params, ScheduleType type, const ScheduleOptions& options) {
  params["warmup_num_steps"] = options.warmup_num_steps;
  params["warmup_type"] = options.warmup_type == WarmupCurve::kLog ? "log" : "linear";
  if (type == ScheduleType::kWarmupCosineLr) {
    params["warmup_min_ratio"] = options.warmup_min_ratio;
    params["cos_min_ratio"] = options.cos_min_ratio;
  } else {
    put_per_group(params, "warmup_min_lr", options.warmup_min_lr);
    put_per_group(params, "warmup_max_lr", options.warmup_max_lr);
  }
  if (type != ScheduleType::kWarmupLr) {
    params["total_num_steps"] = options.total_num_steps;
  }
}

void put_cycle(Json& params, const ScheduleOptions& options) {
  put_per_group(params, "cycle_min_lr", options.cycle_min_lr);
  put_per_group(params, "cycle_max_lr", options.cycle_max_lr);
  params["decay_lr_rate"] = options.decay_lr_rate;
  params["cycle_first_step_size"] = options.cycle_first_step_size;
  put_if(params, "cycle_second_step_size", options.cycle_second_step_size);
  params["cycle_first_stair_count"] = options.cycle_first_stair_count;
  put_if(params, "cycle_second_stair_count", options.cycle_second_stair_count);
  params["decay_step_size"] = options.decay_step_size;
  params["cycle_momentum"] = options.cycle_momentum;
  put_per_group(params, "cycle_min_mom", options.cycle_min_mom);
  put_per_group(params, "cycle_max_mom", options.cycle_max_mom);
  params["decay_mom_rate"] = options.decay_mom_rate;
}

Json scheduler_json(const SchedulerConfig& scheduler) {
  const ScheduleOptions& options = scheduler.options;
  Json params = {{"last_batch_iteration", options.last_batch_iteration}};
  switch (scheduler.type) {
    case ScheduleType::kWarmupLr:
    case ScheduleType::kWarmupDecayLr:
    case ScheduleType::kWarmupCosineLr:
      put_warmup(params, scheduler.type, options);
      break;
    case ScheduleType::kOneCycle:
      put_cycle(params, options);
      break;
    case ScheduleType::kLrRangeTest:
      put_per_group(params, "lr_range_test_min_lr", options.lr_range_test_min_lr);
      params["lr_range_test_step_size"] = options.lr_range_test_step_size;
      params["lr_range_test_step_rate"] = options.lr_range_test_step_rate;
      params["lr_range_test_staircase"] = options.lr_range_test_staircase;
      break;
  }
  return {{"type", to_string(scheduler.type)}, {"params", params}};
}

Json pannier_json(const PannierOptions& options) {
  Json json = {{"device", options.device},
               {"unknown_keys", options.unknown_keys_warn ? "warn" : "error"},
               {"memory_timeline", options.memory_timeline},
               {"overlap_step", options.overlap_step},
               {"stress_seed", options.stress_seed},
               {"trace_step", options.trace_step},
               {"collective_timeout", options.collective_timeout_seconds},
               {"threads", options.threads}};
  put_if(json, "streamed_share", options.streamed_share);
  put_if(json, "trace", options.trace_file);
  put_if(json, "device_memory", options.device_memory_nbytes);
  put_if(json, "host_memory", options.host_memory_nbytes);
  return json;
}

Json fp16_json(const Config& config) {
  const LossScaleOptions& scale = config.loss_scale;
  return {{"enabled", config.dtype == Dtype::kFp16},
          {"loss_scale", scale.static_scale},
          {"initial_scale_power", scale.initial_scale_power},
          {"loss_scale_window", scale.loss_scale_window},
          {"hysteresis", scale.hysteresis},
          {"consecutive_hysteresis", scale.consecutive_hysteresis},
          {"min_loss_scale", scale.min_loss_scale},
          {"auto_cast", config.cast_inputs}};
}

// Writes "auto" again where it is still undecided, so that nobody takes a default for a decision.
void put_autos(Json& root, const std::vector<LeftOverAuto>& autos) {
  for (const LeftOverAuto& key : autos) {
    std::string pointer = "/" + key.path;
    std::ranges::replace(pointer, '.', '/');
    root[Json::json_pointer(pointer)] = "auto";
  }
}

}  // namespace

std::string Config::to_json() const {
  Json root;
  put_batch(root, "train_batch_size", train_batch_size, auto_batch.train);
  put_batch(root, "train_micro_batch_size_per_gpu", train_micro_batch_size_per_gpu, auto_batch.micro);
  put_batch(root, "gradient_accumulation_steps", gradient_accumulation_steps, auto_batch.accumulation);
  root["managed_gradient_accumulation"] = managed_gradient_accumulation;
  root["dataloader_drop_last"] = dataloader_drop_last;
  root["fp16"] = fp16_json(*this);
  root["bf16"] = {{"enabled", dtype == Dtype::kBf16}, {"check_grad_overflow", check_grad_overflow}};
  root["data_types"] = {{"grad_accum_dtype", to_string(grad_accum_dtype)}};
  if (buffer_dtype) {
    root["data_types"]["buffer_dtype"] = to_string(*buffer_dtype);
  }
  root["gradient_clipping"] = gradient_clipping;
  root["gradient_allreduce_op"] = average_gradients ? "mean" : "sum";
  if (optimizer) {
    root["optimizer"] = optimizer_json(*optimizer);
  }
  if (scheduler) {
    root["scheduler"] = scheduler_json(*scheduler);
  }
  root["zero_optimization"] = zero_json(zero);
  if (steps_per_print && std::isfinite(*steps_per_print)) {
    root["steps_per_print"] = *steps_per_print;
  }
  root["wall_clock_breakdown"] = wall_clock_breakdown;
  root["memory_breakdown"] = memory_breakdown;
  root["dump_state"] = dump_state;
  constexpr std::array<const char*, 3> kTagValidation{"Ignore", "Warn", "Fail"};
  root["checkpoint"] = {{"tag_validation", kTagValidation.at(static_cast<std::size_t>(tag_validation))},
                        {"async", async_checkpoint}};
  root["pannier"] = pannier_json(pannier);
  put_autos(root, left_over_autos);
  return root.dump(2);
}

}  // namespace pannier
