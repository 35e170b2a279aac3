// The engine without a module: parameters, their gradients and one optimizer step at a time. Python's engine and the
// C++ Engine are thin coats over it. The step reads like the paper: finish the reduction, look at the norm, decide
// once, update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pannier/ckpt/model_export.h"
#include "pannier/device/device.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/engine/config.h"
#include "pannier/engine/handed_over.h"
#include "pannier/engine/route_planner.h"
#include "pannier/engine/step_tracer.h"
#include "pannier/mem/host_memory.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

class CheckpointSave;

/// What an engine is built from besides the configuration.
struct EngineInputs {
  std::vector<std::string> names;  ///< Of every parameter of the model, each once.
  std::vector<at::Tensor> parameters;
  std::vector<int> group_of;  ///< Parameter group of each; -1: not trained by this engine.
  std::vector<kernels::Hyperparameters> groups;
  std::optional<kernels::Algorithm> algorithm;  ///< Empty: no optimizer, the model only runs forward.
  double initial_accumulator_value = 0.0;
  std::vector<at::Tensor> buffers;  ///< Of the model; moved into counted memory, types and sharing kept.
  /// Where to train. Parameters and buffers that are on the CPU go there, a bucket at a time, so that the device never
  /// holds more than was planned. Empty: where the parameters are.
  std::optional<c10::Device> device = std::nullopt;
  /// Which parameters, by their index here, each unit of the model may read: unit i of tick_forward() those of
  /// everything below it, 0 those of no unit. Matters with stage 3. Empty: units are not known, and nobody says when
  /// they end, so all is whole from tick_forward(0) to the step.
  std::vector<std::vector<std::int64_t>> units = {};
  /// This rank's share of each parameter that was partitioned before: flat, in the order of its memory, of one size on
  /// all ranks, the last ones padded. An empty tensor, or none: the parameter is whole.
  std::vector<at::Tensor> shares = {};
  /// For tests: sees what goes to and comes from the disk; must outlive the engine.
  PieceHook* disk_hook = nullptr;
  /// The ranks that train together; null: this one alone.
  std::unique_ptr<Communicator> communicator = nullptr;

  /// Whether a parameter has no memory of its own, but a share on each rank.
  [[nodiscard]] bool is_shared_out(std::size_t parameter) const {
    return parameter < shares.size() && shares[parameter].defined() && shares[parameter].numel() > 0;
  }
};

/// What a configuration means for the parts of an engine.
[[nodiscard]] PartsOptions parts_options(const Config& config, kernels::Algorithm algorithm,
                                         const std::vector<kernels::Hyperparameters>& groups,
                                         std::int64_t accumulation_steps);

/// How a call of step() ended.
enum class StepOutcome : std::uint8_t { kAccumulating = 0, kApplied = 1, kSkipped = 2 };

/// Counters of a run, as DeepSpeed counts: global steps include skipped ones.
struct Counters {
  std::int64_t global_steps = 0;
  std::int64_t micro_steps = 0;
  std::int64_t skipped_steps = 0;
  std::int64_t global_samples = 0;
};

/// What rests on disks, and what went there and back.
struct NvmeUse {
  NvmeStats states;
  NvmeStats parameters;
};

/// Trains a set of parameters. One thread at a time.
class EngineCore {
 public:
  /// Checks everything, then moves the parameters into their buckets. Throws ConfigError (what the user
  /// wrote), OutOfMemoryError (a plan that exceeds a budget), before anything is changed.
  EngineCore(Config config, EngineInputs inputs, BatchSizes batch);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  /// Opens a backward for `loss` (one element, with a graph). Returns the loss divided by the accumulation steps (which
  /// is what callers report) and what `.backward()` is to be called on (loss scale included).
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> begin_backward(const at::Tensor& loss, bool scale_by_accumulation);
  void end_backward();
  /// A backward threw: drops the whole window; the next step() says so. Other ranks wait for gradients that will not
  /// come, so with several ranks the group ends, and they are told `why`.
  void abort_backward(const std::string& why);
  /// Throws CollectiveError if the group of ranks has ended.
  void check_ranks() { communicator_->check(); }
  /// For a loss whose `.backward()` the caller runs itself.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);

  /// Ends a micro-batch; at the window's end, updates. `groups`: each group's values for this step. Throws ConfigError
  /// for a call out of order, and LossScaleError.
  StepOutcome step(const std::vector<kernels::Hyperparameters>& groups);

  /// The model is about to run one of its units, numbered by the caller in a fixed way.
  void tick_forward(int unit);
  /// Which parameters (by their index in the inputs) each unit may read: unit i of tick_forward() those of everything
  /// below it, 0 those of no unit. Given once, after construction; matters with "overlap_step" only, which without it
  /// waits for everything before the model runs.
  void set_units(const std::vector<std::vector<std::int64_t>>& parameters_of);
  /// The part of tick_forward() that "overlap_step" needs: the parameters of `unit` are in place afterwards.
  void wait_for_unit(int unit);
  /// With "overlap_step": all parameters are in place for what the caller does next.
  void wait_for_parameters();
  /// With stage 3: what makes parameters whole; null: they always are.
  [[nodiscard]] ParameterGatherer* gatherer() noexcept { return parts_ ? parts_->gatherer : nullptr; }
  /// A unit's backward begins: its parameters are whole. It has ended: they may be taken apart, and their gradients
  /// shared.
  void begin_unit_backward(int unit);
  void end_unit_backward(int unit);
  /// Somebody in the model reads a parameter whose unit does not run (ParameterGatherer::use).
  void use(std::int64_t parameter);
  /// Makes parameters whole until let_go(). All ranks call it; does nothing where they always are.
  /// `watches`: values that are written until then by a way that torch does not count (`param.data`) count too.
  void hold(const std::vector<std::int64_t>& parameters, bool watches);
  /// Ends hold(). With a `modifier`, a rank, the others get its values, and it is a ConfigError on all if another rank
  /// changed any; all ranks call it. Without, edits count as they do elsewhere.
  void let_go(const std::vector<std::int64_t>& parameters, std::optional<int> modifier);
  /// Whether parameters may be away when step() has returned.
  [[nodiscard]] bool overlaps() const noexcept { return parts_ != nullptr && parts_->overlap != nullptr; }
  /// Whether the caller should tell units apart by tick_forward().
  [[nodiscard]] bool wants_ticks() const noexcept {
    return parts_ != nullptr && (parts_->pilot != nullptr || tracer_.wants_ticks());
  }
  /// Whether the next step() ends the accumulation window.
  [[nodiscard]] bool is_boundary() const noexcept;
  /// Overrides the counting; empty returns to it.
  void set_boundary(std::optional<bool> boundary) noexcept { boundary_ = boundary; }
  /// While holding, backwards of stage 1 and below add up on each rank, and ranks share the sums later (no_sync).
  void hold_gradients(bool holding) {
    if (parts_) {
      parts_->reducer->hold(holding);
    }
  }
  /// Micro-batches that step() has ended in the open window.
  [[nodiscard]] std::int64_t pending_micro_batches() const noexcept { return micro_in_window_; }
  void set_batch(const BatchSizes& batch) { batch_ = batch; }
  [[nodiscard]] const BatchSizes& batch() const noexcept { return batch_; }

  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
  /// The last update's gradient norm, unscaled and before clipping; infinite for a skipped one; empty before the first.
  [[nodiscard]] std::optional<double> grad_norm() const noexcept { return grad_norm_; }
  [[nodiscard]] LossScaler& loss_scaler() noexcept { return scaler_; }
  /// Whether the last step was skipped.
  [[nodiscard]] bool overflow() const noexcept { return overflow_; }
  [[nodiscard]] const Config& config() const noexcept { return config_; }

  /// An fp32 copy of a state of a parameter (by its index in the inputs): "fp32_param" or one of state_names(). All
  /// ranks call it. ConfigError for a parameter that this engine does not train.
  [[nodiscard]] at::Tensor state(int parameter, const std::string& name);
  /// The opposite. All ranks call it, with the same value, or it is a ConfigError on all.
  void set_state(int parameter, const std::string& name, const at::Tensor& value);
  [[nodiscard]] std::vector<std::string> state_names() const;
  /// Whether this engine trains the parameter of that name.
  [[nodiscard]] bool trains(const std::string& name) const;
  /// Updates that a parameter has had.
  [[nodiscard]] std::int64_t& parameter_step(int parameter);
  /// The window's gradient so far, unscaled, fp32, averaged over ranks (or summed, as the configuration says), all of
  /// which call it; empty when there is none.
  [[nodiscard]] std::optional<at::Tensor> gradient(int parameter);
  /// Replaces the window's gradient, given unscaled. ConfigError where there is none or the shape differs.
  void set_gradient(int parameter, const at::Tensor& value);
  /// Values were written into parameters in a way that torch does not count (through `.data`).
  void parameters_changed();
  /// Forgets the window's gradients (zero_grad).
  void drop_gradients();

  [[nodiscard]] const MemoryPlan& plan() const noexcept { return plan_; }
  /// Who chooses the routes; null: nobody.
  [[nodiscard]] const RoutePlanner* route_planner() const noexcept { return route_planner_.get(); }
  [[nodiscard]] Home optimizer_home() const noexcept { return config_.zero.optimizer_home; }
  [[nodiscard]] Device& device() noexcept { return *device_; }
  [[nodiscard]] const HostMemory& host_memory() const noexcept { return *host_memory_; }
  /// What rests on disks, and what went there and back.
  [[nodiscard]] NvmeUse nvme() const;
  [[nodiscard]] Communicator& communicator() noexcept { return *communicator_; }

  /// Saves everything that a resume needs. All ranks call it. Returns the path of the tag's folder when the checkpoint
  /// is durable. Throws on every rank where one failed, and what was saved before is unharmed: ConfigError for a call
  /// out of order or a tag that can't be, IoError where a disk refuses, CollectiveError where a rank does not come.
  /// With "checkpoint.async" it returns the path when small things are copied; finish_checkpoint() does the rest.
  std::string save_checkpoint(SavePlace place, const CheckpointContents& contents);
  /// Takes the place of save_checkpoint() on a rank that can't say what to save: throws ConfigError there, and on the
  /// ranks that call save_checkpoint().
  void refuse_checkpoint(const std::string& why);
  /// Waits until the last checkpoint is durable, if one is still being written. All ranks call it. Throws as
  /// save_checkpoint(). The next save, load and close() do so too; the next call of others throws where it has failed.
  void finish_checkpoint();
  [[nodiscard]] CheckpointStats checkpoint_stats() const;
  /// Loads one. All ranks call it. Nothing where the folder has no `latest` and no tag was asked for. Gradients of an
  /// open window are dropped. Throws on every rank where one failed; before anything changed where the checkpoint is of
  /// another model, incomplete or of a newer version. Where reading fails later, nothing but another load works.
  [[nodiscard]] std::optional<LoadedCheckpoint> load_checkpoint(const LoadRequest& request);

  /// Writes the model as it is, in its own type, as a Hugging Face folder, a bucket at a time. `untrained`: frozen
  /// parameters and buffers. All ranks call it; rank 0 writes. Throws on every rank where it failed.
  void export_model(const std::string& folder, const ckpt::ModelExportOptions& options,
                    const std::vector<NamedTensor>& untrained);

  /// Starts the peaks of device and host anew.
  void reset_peaks();
  /// Throws ConfigError while a step is, or among ranks may be, half done: an error of a disk interrupted it, and
  /// step() is to be called again.
  void require_whole_step() const;
  /// Waits until every parameter is in place and every state at rest. Throws ConfigError after close(), and as
  /// require_whole_step(); IoError where a state can't be put to rest.
  void synchronize();

  /// Removes the hooks and gives memory back; parameters that are whole keep their values. Later calls of anything else
  /// throw.
  void close() noexcept;
  /// The same; what partitioned parameters hold on this rank goes to the caller. Not a collective.
  [[nodiscard]] std::vector<HandedOver> close_and_hand_over() noexcept;
  [[nodiscard]] bool closed() const noexcept { return closed_; }

 private:
  void check_inputs(const EngineInputs& inputs) const;
  void agree(const EngineInputs& inputs);
  void require_whole_nodes(int node_size) const;
  [[nodiscard]] std::string common_text(const std::vector<kernels::Hyperparameters>& groups);
  void require_same(const at::Tensor& value, const std::string& what);
  void take_edits(bool take_replaced);
  void keep_edits(const std::vector<int>& parameters);
  [[nodiscard]] bool is_trained(const EngineInputs& inputs, std::size_t parameter) const;
  [[nodiscard]] std::vector<std::size_t> number_parameters(const EngineInputs& inputs, PartsOptions& options);
  [[nodiscard]] std::vector<int> managed(const std::vector<std::int64_t>& parameters) const;
  void share_edits(const std::vector<int>& parameters, const std::map<int, std::int64_t>& changed, int modifier);
  [[nodiscard]] std::vector<std::int64_t> bits_of(const std::vector<int>& parameters);
  void note_partitioned_edits(const std::vector<int>& parameters);
  std::map<int, std::int64_t> take_watched_edits(const std::vector<int>& parameters);
  void end_reducer_backward();
  [[nodiscard]] MemoryPlanInput whole_plan_input(PartsOptions& options, const std::vector<std::int64_t>& numels,
                                                 std::size_t unmanaged_nbytes) const;
  void share_unmanaged(const EngineInputs& inputs);
  /// What a window's gradients, summed over ranks, are to be divided by.
  [[nodiscard]] double gradient_scale() const {
    return scaler_.scale() * (config_.average_gradients ? communicator_->world_size() : 1);
  }
  void require_room(const MemoryPlanInput& input, const std::vector<at::Tensor>& moved) const;
  [[nodiscard]] at::ScalarType unmanaged_dtype(const at::Tensor& parameter) const;
  void require_open() const;
  void require_loaded() const;
  void require_no_window() const;
  void rest_for_checkpoint(const char* call);
  [[nodiscard]] std::map<std::string, std::string> own_attributes(
      const std::vector<kernels::Hyperparameters>& groups) const;
  void take_attributes(const LoadRequest& request, const std::map<std::string, std::string>& attributes);
  [[nodiscard]] int managed_index(int parameter) const;
  void begin_unannounced_backward(int parameter);
  void require_outside_backward(const char* call) const;
  void require_separate_memory(const EngineInputs& inputs) const;
  [[noreturn]] void refuse_broken_window();
  void open_backward(std::int64_t divisor = 1);
  void skip_step(const Verdict& verdict);
  [[nodiscard]] std::optional<StepOutcome> end_window(const std::vector<kernels::Hyperparameters>& groups);
  void require_no_update() const;
  void finish_window(const std::vector<kernels::Hyperparameters>& groups);
  void require_all_used();
  void plan_routes(const PartsOptions& options, const MemoryPlanInput& plan);
  /// An update that has begun, so that one which an error interrupts can be finished.
  struct Update {
    Update(UpdatePipeline& pipeline, UpdatePipeline::Coefficients constants, const kernels::UpdateControl& control)
        : coefficients(std::move(constants)), on_device(pipeline.device_updates(coefficients, control)) {}
    UpdatePipeline::Coefficients coefficients;
    UpdatePipeline::DeviceUpdates on_device;
    UpdatePipeline::HostUpdates on_host;
    bool is_overlapped = false;  ///< The host's updates have begun, beside what comes next.
    Verdict verdict;
  };
  void begin_update(const std::vector<kernels::Hyperparameters>& groups);
  void finish_update();
  StepOutcome finish_step();
  [[nodiscard]] std::vector<NvmeStateStore*> disk_stores() const;
  void check_disk();
  void check_save();
  void share_save_end();
  void wait_for_snapshot() noexcept;
  void share_disk_failure(std::exception_ptr error);
  void update_on_host(Update& update);
  void finish_host_updates();

  Config config_;
  BatchSizes batch_;
  std::unique_ptr<Device> device_;
  StepTracer tracer_;
  std::unique_ptr<HostMemory> host_memory_;
  std::unique_ptr<Communicator> communicator_;
  MemoryPlan plan_;
  std::vector<int> managed_of_;  ///< Input index to index in the parts; -1: in none of their buckets.
  std::vector<int> group_of_;    ///< By index in the parts, of those that are trained, which come first.
  std::size_t num_groups_ = 0;
  kernels::Algorithm algorithm_ = kernels::Algorithm::kAdamW;
  std::unique_ptr<Parts> parts_;                 ///< Null without an optimizer.
  std::unique_ptr<RoutePlanner> route_planner_;  ///< Null where the user, or the device, leaves nothing to choose.
  std::vector<std::int64_t> steps_;              ///< Updates of each parameter in the parts.
  std::unique_ptr<Update> update_;               ///< While one runs or is half done.
  std::set<int> edited_;                         ///< Parameters that somebody wrote into since the last step.
  std::map<int, std::int64_t> edited_bits_;      ///< Fingerprints of those that no rank has whole when it steps.
  std::map<int, std::int64_t> watched_bits_;     ///< Fingerprints of held parameters as they were.
  LossScaler scaler_;
  Counters counters_;
  std::int64_t micro_in_window_ = 0;
  std::int64_t backwards_in_window_ = 0;
  std::optional<bool> boundary_;
  std::optional<double> grad_norm_;
  bool overflow_ = false;
  bool broken_ = false;              ///< A backward of this window failed.
  bool lost_micro_batches_ = false;  ///< With it went gradients of earlier micro-batches, so step() must say so.
  bool in_own_backward_ = false;     ///< Between begin_backward() and its end; not in a backward that the caller runs.
  bool has_backward_ = false;        ///< There was a backward since the last step().
  std::optional<std::size_t> cap_;   ///< The device memory cap that this engine has set.
  bool knows_units_ = false;         ///< Somebody says when units begin and end.
  std::unique_ptr<CheckpointSave> save_;  ///< One that is being written.
  double waited_for_saves_s_ = 0.0;       ///< By those before it.
  std::string failed_load_;               ///< The checkpoint whose loading broke off; empty: none.
  bool closed_ = false;
  int process_ = 0;  ///< The process that built it; a forked child does nothing.
};

}  // namespace pannier
