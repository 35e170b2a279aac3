// The configuration: DeepSpeed's JSON, read into plain values. Everything wrong with a text is said at once, with
// dotted paths; docs/config.md lists every key. Reading never decides what only a run can know: `resolve_batch`,
// `require_resolved` and `require_supported` ask for that when the engine is built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pannier/engine/config_parts.h"

namespace pannier {

/// A whole configuration. A plain value: thread-safe to read, and the user's text or dict is never changed.
struct Config {
  /// Reads JSON; // and /* */ comments are allowed. Throws one ConfigError that lists everything that is wrong.
  [[nodiscard]] static Config from_text(std::string_view text);
  /// Reads a file. Throws IoError for a file that can't be read and ConfigError, which names the path, for its content.
  [[nodiscard]] static Config from_file(const std::string& path);

  /// What a user should know: accepted aliases, deprecations, keys that mean nothing here, unsupported keys that are
  /// off.
  std::vector<std::string> notes;
  /// Keys left "auto" that decide something, with who needs them.
  std::vector<LeftOverAuto> left_over_autos;

  std::optional<std::int64_t> train_batch_size;                ///< Samples per optimizer step over all ranks.
  std::optional<std::int64_t> train_micro_batch_size_per_gpu;  ///< Samples per rank and forward.
  std::optional<std::int64_t> gradient_accumulation_steps;     ///< Micro-batches per optimizer step.
  AutoBatch auto_batch;                                        ///< Which of the three are written "auto".

  Dtype dtype = Dtype::kFp32;             ///< Of parameters and gradients.
  LossScaleOptions loss_scale;            ///< Read with kFp16 only; see effective_loss_scale().
  bool check_grad_overflow = true;        ///< Skip a step with a non-finite gradient.
  bool cast_inputs = false;               ///< fp16.auto_cast: floating inputs of forward become fp16.
  std::optional<Dtype> buffer_dtype;      ///< data_types.buffer_dtype: what floating buffers become.
  Dtype grad_accum_dtype = Dtype::kFp32;  ///< In which gradients add up over micro-batches.
  Zero zero;
  std::optional<OptimizerConfig> optimizer;
  std::optional<SchedulerConfig> scheduler;
  double gradient_clipping = 1.0;             ///< Greatest global norm; 0 turns clipping off.
  bool average_gradients = true;              ///< false: gradient_allreduce_op "sum".
  bool managed_gradient_accumulation = true;  ///< false: every step() is a boundary.
  std::optional<double> steps_per_print;      ///< May be infinite; not given or infinite: never.
  bool wall_clock_breakdown = false;
  bool memory_breakdown = false;
  bool dump_state = false;
  bool dataloader_drop_last = false;
  TagValidation tag_validation = TagValidation::kWarn;
  bool async_checkpoint = false;  ///< save_checkpoint() returns while states are still being written.
  PannierOptions pannier;

  /// The scale of fp16 training; scale 1 that never changes for other types.
  [[nodiscard]] LossScaleOptions effective_loss_scale() const;

  /// Completes the three batch sizes. `loader_batch` is the loader's (or the first batch's) size per rank. Throws
  /// ConfigError naming the three keys, the world size and the product that fails.
  [[nodiscard]] BatchSizes resolve_batch(int world_size, std::optional<std::int64_t> loader_batch) const;

  /// Throws one ConfigError that lists the keys left "auto" which decide something for what is built from the
  /// configuration (not those of an optimizer or schedule that the caller brings).
  void require_resolved(bool builds_optimizer, bool builds_schedule) const;

  /// Throws one ConfigError that lists what this version can't run.
  void require_supported() const;

  /// The resolved configuration with all defaults, as JSON in DeepSpeed's shape.
  [[nodiscard]] std::string to_json() const;
};

/// One row of the key table, for documentation and tools.
struct ConfigKey {
  std::string path;           ///< Dotted, such as "zero_optimization.stage".
  std::string status;         ///< "supported", "unused", "ignored", "refused" (an error where it is on) or "alias".
  std::string default_value;  ///< As JSON, "-" for none; of an alias the key that it means.
};

/// Every key that the configuration knows, in the order of docs/config.md.
[[nodiscard]] std::vector<ConfigKey> config_keys();

}  // namespace pannier
