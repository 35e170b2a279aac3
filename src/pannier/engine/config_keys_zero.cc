// zero_optimization, the homes of states, and Pannier's own section.
#include <array>

#include "pannier/engine/config_keys.h"

namespace pannier::config {
namespace {

using enum Kind;
using enum Status;
using enum Auto;

// clang-format off: one row a line reads as the table that it is.
constexpr auto kRows = std::to_array<KeyRow>({
    KeyRow{"zero_optimization", kSection},
    KeyRow{"zero_optimization.stage", kInteger, kSupported, "0"}.from(0).to(3).when_auto(kAlwaysNeeded),
    KeyRow{"zero_optimization.offload_optimizer", kSection},
    KeyRow{"zero_optimization.offload_optimizer.device", kChoice, kSupported, "\"none\""}.one_of("none|cpu|nvme").when_auto(kAlwaysNeeded),
    KeyRow{"zero_optimization.offload_optimizer.nvme_path", kPaths},
    KeyRow{"zero_optimization.offload_optimizer.buffer_count", kInteger, kSupported, "5"}.from(1).to(1e6),
    KeyRow{"zero_optimization.offload_optimizer.buffer_size", kBytes, kSupported, "104857600"}.from(1),
    KeyRow{"zero_optimization.offload_optimizer.pin_memory", kBool, kUnused, "true"},
    KeyRow{"zero_optimization.offload_optimizer.ratio", kNumber, kSupported, "1.0"}.from(0).to(1),
    KeyRow{"zero_optimization.offload_optimizer.pipeline_read", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.offload_optimizer.pipeline_write", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.offload_optimizer.fast_init", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.offload_optimizer.super_offload", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.offload_optimizer.cpuadam_cores_perc", kNumber, kIgnored, "0.8"}.from(0).to(1),
    KeyRow{"zero_optimization.offload_param", kSection},
    KeyRow{"zero_optimization.offload_param.device", kChoice, kSupported, "\"none\""}.one_of("none|cpu|nvme").when_auto(kAlwaysNeeded),
    KeyRow{"zero_optimization.offload_param.nvme_path", kPaths},
    KeyRow{"zero_optimization.offload_param.buffer_count", kInteger, kSupported, "5"}.from(1).to(1e6),
    KeyRow{"zero_optimization.offload_param.buffer_size", kSize, kSupported, "1e8"}.from(1),
    KeyRow{"zero_optimization.offload_param.max_in_cpu", kSize, kSupported, "0"}.from(0),
    KeyRow{"zero_optimization.offload_param.pin_memory", kBool, kUnused, "true"},
    KeyRow{"zero_optimization.reduce_bucket_size", kSize, kSupported, "16777216"}.from(1),
    KeyRow{"zero_optimization.ignore_unused_parameters", kBool, kSupported, "true"},
    KeyRow{"zero_optimization.stage3_prefetch_bucket_size", kSize, kSupported}.from(0),
    KeyRow{"zero_optimization.stage3_param_persistence_threshold", kSize, kSupported}.from(0),
    KeyRow{"zero_optimization.stage3_max_live_parameters", kSize, kUnused}.from(0),
    KeyRow{"zero_optimization.stage3_max_reuse_distance", kSize, kUnused}.from(0),
    KeyRow{"zero_optimization.stage3_gather_16bit_weights_on_model_save", kBool, kUnused, "false"},
    KeyRow{"zero_optimization.contiguous_gradients", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.reduce_scatter", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.use_multi_rank_bucket_allreduce", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.allgather_partitions", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.allgather_bucket_size", kSize, kIgnored}.from(0),
    KeyRow{"zero_optimization.overlap_comm", kBool, kIgnored},
    KeyRow{"zero_optimization.round_robin_gradients", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.sub_group_size", kSize, kIgnored}.from(0),
    KeyRow{"zero_optimization.load_from_fp32_weights", kBool, kRefused, "true"},
    KeyRow{"zero_optimization.elastic_checkpoint", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.stage3_model_persistence_threshold", kSize, kIgnored}.from(0),
    KeyRow{"zero_optimization.stage3_module_granularity_threshold", kSize, kIgnored, "0"},
    KeyRow{"zero_optimization.stage3_use_all_reduce_for_fetch_params", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.stage3_allgather_sequential", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.leaf_module", kSection, kIgnored},
    KeyRow{"zero_optimization.leaf_module.classes", kAny, kIgnored},
    KeyRow{"zero_optimization.leaf_module.names", kAny, kIgnored},
    KeyRow{"zero_optimization.leaf_module.name_suffixes", kAny, kIgnored},
    KeyRow{"zero_optimization.memory_efficient_linear", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.override_module_apply", kBool, kIgnored, "true"},
    KeyRow{"zero_optimization.pipeline_loading_checkpoint", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.log_trace_cache_warnings", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.enable_sanity_checks", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.save_muon_momentum_buffer_in_memory", kBool, kIgnored, "false"},
    KeyRow{"zero_optimization.legacy_stage1", kBool, kRefused, "false"},
    KeyRow{"zero_optimization.zero_hpz_partition_size", kInteger, kSupported, "1"}.from(0),
    KeyRow{"zero_optimization.zero_quantized_weights", kBool, kRefused, "false"},
    KeyRow{"zero_optimization.zero_quantized_nontrainable_weights", kBool, kRefused, "false"},
    KeyRow{"zero_optimization.zero_quantized_gradients", kBool, kRefused, "false"},
    KeyRow{"zero_optimization.zeropp_loco_param", kPresence, kRefused},
    KeyRow{"zero_optimization.mics_shard_size", kInteger, kRefused, "-1"}.from(-1),
    KeyRow{"zero_optimization.mics_hierarchical_params_gather", kBool, kRefused, "false"},
    KeyRow{"zero_optimization.zenflow", kPresence, kRefused},

    KeyRow{"pannier", kSection},
    KeyRow{"pannier.device", kChoice, kSupported, "\"auto\""}.one_of("auto|cpu|cuda"),
    KeyRow{"pannier.device_memory", kBytes}.from(1),
    KeyRow{"pannier.host_memory", kBytes}.from(1),
    KeyRow{"pannier.unknown_keys", kChoice, kSupported, "\"error\""}.one_of("error|warn"),
    KeyRow{"pannier.memory_timeline", kBool, kSupported, "false"},
    KeyRow{"pannier.overlap_step", kBool, kSupported, "false"},
    KeyRow{"pannier.streamed_share", kNumber}.from(0).to(1),
    KeyRow{"pannier.stress_seed", kInteger, kSupported, "0"}.from(0),
    KeyRow{"pannier.trace", kText},
    KeyRow{"pannier.trace_step", kInteger, kSupported, "10"}.from(1),
    KeyRow{"pannier.collective_timeout", kNumber, kSupported, "600"}.above(0),
    KeyRow{"pannier.threads", kInteger, kSupported, "0"}.from(0).to(4096),
});

constexpr auto kAliases = std::to_array<Alias>({
    {"bfloat16", "bf16"},
    {"zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"},
    {"zero_optimization.param_persistence_threshold", "zero_optimization.stage3_param_persistence_threshold"},
    {"zero_optimization.model_persistence_threshold", "zero_optimization.stage3_model_persistence_threshold"},
    {"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"},
    {"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"},
    {"zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.module_granularity_threshold", "zero_optimization.stage3_module_granularity_threshold"},
    {"zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params"},
    {"zero_optimization.allgather_sequential", "zero_optimization.stage3_allgather_sequential"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.stage3_gather_16bit_weights_on_model_save", true},
    {"zero_optimization.stage3_max_live_params", "zero_optimization.stage3_max_live_parameters"},
    {"zero_optimization.stage3_prefetch_size", "zero_optimization.stage3_prefetch_bucket_size"},
    {"zero_optimization.stage3_max_unused_params", "zero_optimization.stage3_max_reuse_distance"},
    {"zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device", true},
    {"zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device", true},
    {"zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory", true},
});
// clang-format on

}  // namespace

std::span<const KeyRow> zero_keys() { return kRows; }

std::span<const Alias> aliases() { return kAliases; }

}  // namespace pannier::config
