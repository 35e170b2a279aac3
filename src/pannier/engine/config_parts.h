// The parts that a Config is made of: plain structs with the defaults in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pannier/kernels/update.h"
#include "pannier/layout/home.h"
#include "pannier/optim/loss_scaler.h"
#include "pannier/optim/schedule.h"

namespace pannier {

/// Element type of parameters and gradients.
enum class Dtype : std::uint8_t { kFp32, kFp16, kBf16 };

/// "fp32", "fp16" or "bf16".
[[nodiscard]] const char* to_string(Dtype dtype) noexcept;

/// Who needs a key that was left "auto".
enum class AutoUse : std::uint8_t { kAlways, kOptimizer, kSchedule };

/// A key left "auto" that decides something.
struct LeftOverAuto {
  std::string path = {};
  AutoUse use = AutoUse::kAlways;
};

/// Which batch keys are written "auto".
struct AutoBatch {
  bool train = false;
  bool micro = false;
  bool accumulation = false;
};

/// The batch sizes of a run: train = micro * accumulation * world size.
struct BatchSizes {
  std::int64_t train = 0;
  std::int64_t micro = 0;
  std::int64_t accumulation = 1;
  /// false: the micro batch is "auto" and nobody has said it yet; resolve again with the first batch's size. Then train
  /// and micro are 0, and accumulation is only final if it was written.
  bool complete = true;
};

/// The zero_optimization section. An empty optional leaves the choice to the planner.
struct Zero {
  int stage = 0;                                       ///< 0 to 3.
  Home optimizer_home = Home::kDevice;                 ///< offload_optimizer.device.
  Home param_home = Home::kDevice;                     ///< offload_param.device; needs stage 3.
  std::vector<std::string> optimizer_nvme_paths = {};  ///< offload_optimizer.nvme_path; empty unless given.
  std::vector<std::string> param_nvme_paths = {};      ///< offload_param.nvme_path; empty unless given.
  double ratio = 1.0;                                  ///< offload_optimizer.ratio: share of the states that goes.
  std::int64_t buffer_count = 5;                       ///< Staging buffers of the NVMe home (offload_optimizer).
  std::size_t buffer_nbytes = 104'857'600;             ///< offload_optimizer.buffer_size: bytes of one of them.
  std::int64_t param_buffer_count = 5;                 ///< offload_param.buffer_count.
  std::int64_t param_buffer_numel = 100'000'000;       ///< offload_param.buffer_size, in elements as in DeepSpeed.
  std::int64_t param_max_in_host_numel = 0;            ///< offload_param.max_in_cpu.
  bool pin_memory = true;                              ///< Page-lock host memory of either offload.
  std::int64_t bucket_numel = std::int64_t{16} << 20;  ///< reduce_bucket_size, in elements.
  bool bucket_given = false;                           ///< bucket_numel was written, not chosen here.
  bool ignore_unused_parameters = true;                ///< false: a parameter without gradient is an error.
  bool gather_16bit_weights_on_model_save = false;     ///< Stage 3: consolidated 16-bit saving is allowed.
  std::optional<std::int64_t> prefetch_bucket_numel = std::nullopt;    ///< stage3_prefetch_bucket_size.
  std::optional<std::int64_t> param_persistence_numel = std::nullopt;  ///< stage3_param_persistence_threshold.
  int node_size = 0;  ///< zero_hpz_partition_size: ranks that keep a copy of the parameters among them; 0, 1: all do.
  std::optional<std::int64_t> max_live_numel = std::nullopt;            ///< stage3_max_live_parameters.
  std::optional<std::int64_t> max_reuse_distance_numel = std::nullopt;  ///< stage3_max_reuse_distance.
};

/// The optimizer section.
struct OptimizerConfig {
  std::string type = {};  ///< As written.
  kernels::Algorithm algorithm = kernels::Algorithm::kAdamW;
  kernels::Hyperparameters hyper = {};     ///< Defaults of the type filled in.
  double initial_accumulator_value = 0.0;  ///< Adagrad.
};

/// The scheduler section.
struct SchedulerConfig {
  ScheduleType type = ScheduleType::kWarmupLr;
  ScheduleOptions options;
};

/// What save_checkpoint does about a tag that differs between ranks.
enum class TagValidation : std::uint8_t { kIgnore, kWarn, kFail };

/// The pannier section: keys of our own.
struct PannierOptions {
  std::string device = "auto";  ///< Where a model that is on the CPU is trained: "auto", "cpu" or "cuda".
  std::optional<std::size_t> device_memory_nbytes = std::nullopt;  ///< Budget on the device; not given: what is free.
  std::optional<std::size_t> host_memory_nbytes =
      std::nullopt;                ///< Budget on the host; not given: what the limits allow.
  bool unknown_keys_warn = false;  ///< unknown_keys "warn": unknown keys become notes.
  bool memory_timeline = false;    ///< Record device memory from the engine's start on.
  bool overlap_step = false;       ///< step() returns before all parameters are in place.
  std::optional<double> streamed_share =
      std::nullopt;               ///< Share of host-resident states that the device updates; not given: planned.
  std::uint64_t stress_seed = 0;  ///< Not 0: random delays on every thread and queue of ours, to shake races out.
  std::optional<std::string> trace_file = std::nullopt;  ///< One step's trace goes here.
  std::int64_t trace_step = 10;                          ///< That step, counted from 1.
  double collective_timeout_seconds = 600;               ///< A collective that takes longer is an error.
  int threads = 0;                                       ///< Most threads of the host's update; 0: planned.
};

}  // namespace pannier
