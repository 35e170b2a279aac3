#include "pannier/engine/config_build.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "pannier/base/error.h"

namespace pannier::config {
namespace {

Home home_of(const std::string& device) {
  return device == "nvme" ? Home::kNvme : device == "cpu" ? Home::kHost : Home::kDevice;
}

// A path that was given; "none" is what some launchers write for no path.
Texts nvme_paths_of(const Values& values, const std::string& section) {
  const Texts paths = values.find<Texts>(section + ".nvme_path").value_or(Texts{});
  return paths == Texts{"none"} || paths == Texts{""} ? Texts{} : paths;
}

std::optional<std::size_t> nbytes_of(const Values& values, const std::string& path) {
  const auto nbytes = values.find<std::int64_t>(path);
  return nbytes ? std::optional(static_cast<std::size_t>(*nbytes)) : std::nullopt;
}

Zero build_zero(const Values& values) {
  const std::string zero = "zero_optimization.";
  const std::string optimizer = zero + "offload_optimizer";
  const std::string param = zero + "offload_param";
  Zero built;
  built.stage = static_cast<int>(values.whole(zero + "stage"));
  built.optimizer_home = home_of(values.text(optimizer + ".device"));
  built.param_home = home_of(values.text(param + ".device"));
  built.optimizer_nvme_paths = nvme_paths_of(values, optimizer);
  built.param_nvme_paths = nvme_paths_of(values, param);
  built.ratio = values.number(optimizer + ".ratio");
  built.buffer_count = values.whole(optimizer + ".buffer_count");
  built.buffer_nbytes = static_cast<std::size_t>(values.whole(optimizer + ".buffer_size"));
  built.param_buffer_count = values.whole(param + ".buffer_count");
  built.param_buffer_numel = values.whole(param + ".buffer_size");
  built.param_max_in_host_numel = values.whole(param + ".max_in_cpu");
  built.pin_memory = values.flag(optimizer + ".pin_memory") && values.flag(param + ".pin_memory");
  built.bucket_numel = values.whole(zero + "reduce_bucket_size");
  built.bucket_given = values.has(zero + "reduce_bucket_size");
  built.ignore_unused_parameters = values.flag(zero + "ignore_unused_parameters");
  built.gather_16bit_weights_on_model_save = values.flag(zero + "stage3_gather_16bit_weights_on_model_save");
  built.prefetch_bucket_numel = values.find<std::int64_t>(zero + "stage3_prefetch_bucket_size");
  built.param_persistence_numel = values.find<std::int64_t>(zero + "stage3_param_persistence_threshold");
  built.node_size = static_cast<int>(values.whole(zero + "zero_hpz_partition_size"));
  built.max_live_numel = values.find<std::int64_t>(zero + "stage3_max_live_parameters");
  built.max_reuse_distance_numel = values.find<std::int64_t>(zero + "stage3_max_reuse_distance");
  return built;
}

// Whether the stage is as the user wants it, not a default in the place of a wrong value or of an "auto".
bool knows_stage(const Values& values, const Json& root) {
  const Json section = root.value("zero_optimization", Json::object());
  return values.has("zero_optimization.stage") || !section.is_object() || section.value("stage", Json()).is_null();
}

// Pairs of settings that can't be true together, each with the way out.
void check_zero(const Zero& zero, bool knows_stage, Report& report) {
  const std::string optimizer = "zero_optimization.offload_optimizer";
  const std::string param = "zero_optimization.offload_param";
  if (zero.param_home != Home::kDevice && zero.stage < 3 && knows_stage) {
    report.wrong(param + ".device",
                 fmt::format("offload_param needs zero_optimization.stage 3, but the stage is {}; set "
                             "stage 3, or the device to \"none\"",
                             zero.stage));
  }
  if (zero.node_size > 1 && zero.stage < 3 && knows_stage) {
    report.notes.push_back(fmt::format(
        "zero_optimization.zero_hpz_partition_size: without effect, since parameters are not partitioned at stage {}",
        zero.stage));
  }
  if (zero.optimizer_home != Home::kDevice && zero.stage < 1 && knows_stage) {
    report.wrong(optimizer + ".device",
                 "offload_optimizer needs zero_optimization.stage 1, 2 or 3, but the stage is 0; set a stage, or the "
                 "device to \"none\"");
  }
  if (zero.optimizer_home == Home::kNvme && zero.optimizer_nvme_paths.empty()) {
    report.wrong(optimizer + ".nvme_path",
                 "the device \"nvme\" needs a folder on the disk, and nvme_path is not given");
  }
  if (zero.param_home == Home::kNvme && zero.param_nvme_paths.empty()) {
    report.wrong(param + ".nvme_path", "the device \"nvme\" needs a folder on the disk, and nvme_path is not given");
  }
  if (zero.optimizer_home == Home::kNvme && zero.ratio < 1.0) {
    report.wrong(optimizer + ".ratio", fmt::format("{} can't go with the device \"nvme\"; leave ratio out, or set the "
                                                   "device to \"cpu\"",
                                                   zero.ratio));
  }
}

LossScaleOptions build_loss_scale(const Values& values) {
  LossScaleOptions options;
  options.static_scale = values.number("fp16.loss_scale");
  options.initial_scale_power = static_cast<int>(values.whole("fp16.initial_scale_power"));
  options.loss_scale_window = values.whole("fp16.loss_scale_window");
  options.hysteresis = static_cast<int>(values.whole("fp16.hysteresis"));
  options.consecutive_hysteresis = values.flag("fp16.consecutive_hysteresis");
  options.min_loss_scale = values.number("fp16.min_loss_scale");
  return options;
}

void build_precision(Config& config, const Values& values, Report& report) {
  const bool fp16 = values.flag("fp16.enabled");
  const bool bf16 = values.flag("bf16.enabled");
  if (fp16 && bf16) {
    report.wrong("fp16.enabled", "fp16 and bf16 can't both be on; turn fp16.enabled or bf16.enabled off");
  }
  config.dtype = fp16 ? Dtype::kFp16 : bf16 ? Dtype::kBf16 : Dtype::kFp32;
  config.loss_scale = build_loss_scale(values);
  config.cast_inputs = fp16 && values.flag("fp16.auto_cast");
  if (const auto buffers = values.find<std::string>("data_types.buffer_dtype")) {
    config.buffer_dtype = buffers->starts_with("b")  ? Dtype::kBf16
                          : buffers->ends_with("32") ? Dtype::kFp32
                                                     : Dtype::kFp16;
  }
  config.check_grad_overflow = values.flag("bf16.check_grad_overflow");
  if (fp16) {
    config.check_grad_overflow = true;
    try {
      config.loss_scale.validate();
    } catch (const ConfigError& error) {
      report.errors.emplace_back(error.what());
    }
  }
  const std::string accumulation = values.text("data_types.grad_accum_dtype");
  if (accumulation.starts_with("b")) {
    config.grad_accum_dtype = Dtype::kBf16;
    if (config.dtype != Dtype::kBf16) {
      report.wrong("data_types.grad_accum_dtype",
                   fmt::format("\"{}\" needs bf16.enabled, but the parameters are {}; turn bf16 on, or use \"fp32\"",
                               accumulation, to_string(config.dtype)));
    }
  }
}

PannierOptions build_pannier(const Values& values) {
  PannierOptions options;
  options.device = values.text("pannier.device");
  options.device_memory_nbytes = nbytes_of(values, "pannier.device_memory");
  options.host_memory_nbytes = nbytes_of(values, "pannier.host_memory");
  options.unknown_keys_warn = values.text("pannier.unknown_keys") == "warn";
  options.memory_timeline = values.flag("pannier.memory_timeline");
  options.overlap_step = values.flag("pannier.overlap_step");
  options.streamed_share = values.find<double>("pannier.streamed_share");
  options.stress_seed = static_cast<std::uint64_t>(values.whole("pannier.stress_seed"));
  options.trace_file = values.find<std::string>("pannier.trace");
  options.trace_step = values.whole("pannier.trace_step");
  options.collective_timeout_seconds = values.number("pannier.collective_timeout");
  options.threads = static_cast<int>(values.whole("pannier.threads"));
  return options;
}

TagValidation tag_validation_of(const std::string& text) {
  return text == "Ignore" ? TagValidation::kIgnore : text == "Fail" ? TagValidation::kFail : TagValidation::kWarn;
}

}  // namespace

Config build_config(const Values& values, const Json& root, Report& report) {
  Config config;
  config.train_batch_size = values.find<std::int64_t>("train_batch_size");
  config.train_micro_batch_size_per_gpu = values.find<std::int64_t>("train_micro_batch_size_per_gpu");
  config.gradient_accumulation_steps = values.find<std::int64_t>("gradient_accumulation_steps");
  build_precision(config, values, report);
  config.zero = build_zero(values);
  check_zero(config.zero, knows_stage(values, root), report);
  config.optimizer = build_optimizer(values, root, report);
  config.scheduler = build_scheduler(values, root, report);
  const double clipping = values.number("gradient_clipping");
  config.gradient_clipping = std::isinf(clipping) ? 0.0 : clipping;  // Nothing is above infinity.
  config.average_gradients = values.text("gradient_allreduce_op") == "mean";
  config.managed_gradient_accumulation = values.flag("managed_gradient_accumulation");
  config.steps_per_print = values.find<double>("steps_per_print");
  config.wall_clock_breakdown = values.flag("wall_clock_breakdown");
  config.memory_breakdown = values.flag("memory_breakdown");
  config.dump_state = values.flag("dump_state");
  config.dataloader_drop_last = values.flag("dataloader_drop_last");
  config.tag_validation = tag_validation_of(values.text("checkpoint.tag_validation"));
  config.async_checkpoint = values.flag("checkpoint.async");
  config.pannier = build_pannier(values);
  return config;
}

}  // namespace pannier::config
