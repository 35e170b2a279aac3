// Logging, checkpoints, I/O, and the features of DeepSpeed that Pannier does not have.
#include <array>

#include "pannier/engine/config_keys.h"

namespace pannier::config {
namespace {

using enum Kind;
using enum Status;

// clang-format off: one row a line reads as the table that it is.
constexpr auto kRows = std::to_array<KeyRow>({
    KeyRow{"steps_per_print", kNumber, kUnused}.from(0).infinite(),
    KeyRow{"wall_clock_breakdown", kBool, kUnused, "false"},
    KeyRow{"memory_breakdown", kBool, kUnused, "false"},
    KeyRow{"dump_state", kBool, kUnused, "false"},
    KeyRow{"log_level", kText, kIgnored},
    KeyRow{"timers", kSection, kIgnored},
    KeyRow{"timers.throughput", kSection, kIgnored},
    KeyRow{"timers.throughput.enabled", kBool, kIgnored, "true"},
    KeyRow{"timers.throughput.synchronized", kBool, kIgnored, "true"},
    KeyRow{"vocabulary_size", kInteger, kIgnored},

    KeyRow{"checkpoint", kSection},
    KeyRow{"checkpoint.tag_validation", kChoice, kSupported, "\"Warn\""}.one_of("Ignore|Warn|Fail").either_case(),
    KeyRow{"checkpoint.async", kBool, kSupported, "false"},
    KeyRow{"checkpoint.load_universal", kBool, kIgnored, "false"},
    KeyRow{"checkpoint.use_node_local_storage", kBool, kRefused, "false"},
    KeyRow{"checkpoint.parallel_write", kSection, kIgnored},
    KeyRow{"checkpoint.parallel_write.pipeline_stage", kBool, kIgnored, "false"},
    KeyRow{"checkpoint.checkpoint_serialization", kBool, kIgnored, "true"},
    KeyRow{"checkpoint.writer", kOpaque, kIgnored},

    KeyRow{"aio", kSection, kIgnored},
    KeyRow{"aio.block_size", kSize, kIgnored, "1048576"}.from(1),
    KeyRow{"aio.queue_depth", kInteger, kIgnored, "8"}.from(1),
    KeyRow{"aio.intra_op_parallelism", kInteger, kIgnored, "1"}.from(1),
    KeyRow{"aio.thread_count", kInteger, kIgnored, "1"}.from(1),
    KeyRow{"aio.single_submit", kBool, kIgnored, "false"},
    KeyRow{"aio.overlap_events", kBool, kIgnored, "true"},
    KeyRow{"aio.use_gds", kBool, kIgnored, "false"},

    KeyRow{"activation_checkpointing", kSection},
    KeyRow{"activation_checkpointing.partition_activations", kBool, kRefused, "false"},
    KeyRow{"activation_checkpointing.cpu_checkpointing", kBool, kRefused, "false"},
    KeyRow{"activation_checkpointing.contiguous_memory_optimization", kBool, kIgnored, "false"},
    KeyRow{"activation_checkpointing.number_checkpoints", kInteger, kIgnored}.from(0),
    KeyRow{"activation_checkpointing.synchronize_checkpoint_boundary", kBool, kIgnored, "false"},
    KeyRow{"activation_checkpointing.profile", kBool, kIgnored, "false"},

    KeyRow{"flops_profiler", kSection},
    KeyRow{"flops_profiler.enabled", kBool, kRefused, "false"},
    KeyRow{"flops_profiler.recompute_fwd_factor", kNumber, kIgnored, "0"},
    KeyRow{"flops_profiler.profile_step", kInteger, kIgnored, "1"},
    KeyRow{"flops_profiler.module_depth", kInteger, kIgnored, "-1"},
    KeyRow{"flops_profiler.top_modules", kInteger, kIgnored, "1"},
    KeyRow{"flops_profiler.detailed", kBool, kIgnored, "true"},
    KeyRow{"flops_profiler.output_file", kText, kIgnored},
    KeyRow{"comms_logger", kSection},
    KeyRow{"comms_logger.enabled", kBool, kRefused, "false"},
    KeyRow{"comms_logger.prof_all", kBool, kIgnored, "true"},
    KeyRow{"comms_logger.prof_ops", kAny, kIgnored, "[]"},
    KeyRow{"comms_logger.verbose", kBool, kIgnored, "false"},
    KeyRow{"comms_logger.debug", kBool, kIgnored, "false"},
    KeyRow{"tensorboard", kOpaque, kRefused},
    KeyRow{"wandb", kOpaque, kRefused},
    KeyRow{"csv_monitor", kOpaque, kRefused},
    KeyRow{"comet", kOpaque, kRefused},

    KeyRow{"compile", kOpaque, kRefused},
    KeyRow{"elasticity", kOpaque, kRefused},
    KeyRow{"hybrid_engine", kOpaque, kRefused},
    KeyRow{"pipeline", kOpaque, kIgnored},
    KeyRow{"tensor_parallel", kOpaque, kRefused},
    KeyRow{"sequence_parallel_size", kInteger, kRefused, "1"}.from(1),
    KeyRow{"expert_parallel", kOpaque, kRefused},
    KeyRow{"use_data_before_expert_parallelism", kBool, kIgnored, "false"},
    KeyRow{"compression_training", kOpaque, kRefused},
    KeyRow{"weight_quantization", kPresence, kRefused},
    KeyRow{"quantize_training", kOpaque, kRefused},
    KeyRow{"sparse_attention", kPresence, kRefused},
    KeyRow{"data_efficiency", kOpaque, kRefused},
    KeyRow{"curriculum_learning", kOpaque, kRefused},
    KeyRow{"eigenvalue", kOpaque, kRefused},
    KeyRow{"progressive_layer_drop", kOpaque, kRefused},
    KeyRow{"nebula", kOpaque, kRefused},
    KeyRow{"datastates_ckpt", kPresence, kRefused},
    KeyRow{"autotuning", kOpaque, kRefused},
    KeyRow{"graph_harvesting", kBool, kRefused, "false"},
});
// clang-format on

}  // namespace

std::span<const KeyRow> other_keys() { return kRows; }

}  // namespace pannier::config
