// The engine for C++ programs: the verbs of the Python engine for a torch::nn module.
//
//   auto engine = pannier::initialize(model, pannier::Config::from_file("ds_config.json"));
//   auto loss = torch::cross_entropy_loss(model->forward(x), y);
//   engine->backward(loss);
//   engine->step();
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pannier/engine/config.h"
#include "pannier/engine/engine_core.h"
#include "pannier/engine/unit_runs.h"
#include "pannier/engine/zero_init.h"
#include "pannier/optim/schedule.h"

namespace torch::nn {
class Module;
}

namespace pannier {

/// Parameters that are updated with values of their own.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  kernels::Hyperparameters hyper;
};

/// What initialize() may be given beside the model.
struct InitializeOptions {
  /// Empty: all parameters that require a gradient are one group.
  std::vector<ParameterGroup> groups = {};
  /// The ranks that train together (make_c10d_communicator()); null: this process alone, or those of `init`.
  std::unique_ptr<Communicator> communicator = nullptr;
  /// Parts of the model that its forward runs with run_unit(), in the order in which they run. With stage 3 and with
  /// "overlap_step" only the parameters of the units that run, and of the next ones, are in place.
  std::vector<std::shared_ptr<torch::nn::Module>> units = {};
  /// What the model was partitioned with while it was built; its ranks are those that train.
  std::optional<ZeroInit> init = std::nullopt;
};

/// Trains one module. One thread at a time; the module must outlive nothing: the engine shares it.
class Engine {
 public:
  /// See initialize().
  Engine(std::shared_ptr<torch::nn::Module> module, const Config& config, InitializeOptions options);

  /// Says that the module's forward is about to run a part of it, such as a transformer's block: `index` counts them
  /// from 1 in the order in which they run; 0 is the forward itself. Without it optimizer states that travel to the
  /// device are back on the host before forward begins; with it they may stay until their memory is needed. Results do
  /// not depend on it. With "overlap_step" it also waits for the parameters that the unit reads (core().set_units();
  /// else all), so begin_unit(0) must come before each forward: parameters that are not in place throw when they are
  /// read. The same holds for parameters that are partitioned or offloaded (stage 3), which are all whole from
  /// begin_unit(0) to the step. A model whose units were given to initialize() runs them with run_unit() instead, which
  /// calls this.
  void begin_unit(int index) { core_.tick_forward(index); }

  /// Runs backward from a loss of one element; gradients go to the engine. Returns the loss divided by the accumulation
  /// steps. Throws ConfigError, and what the graph throws; the accumulation window is then dropped.
  at::Tensor backward(const at::Tensor& loss, bool retain_graph = false);
  /// Ends a micro-batch; at the window's end updates the parameters and advances the schedule. Throws ConfigError for a
  /// call out of order, and LossScaleError.
  StepOutcome step();

  /// Saves everything that a resume needs: folder/tag, "global_step" and the step where no tag is given. `client_state`
  /// comes back from load_checkpoint(). All ranks call it; see EngineCore::save_checkpoint. Returns the path.
  std::string save_checkpoint(const std::string& folder, const std::string& tag = "",
                              const std::map<std::string, std::string>& client_state = {}, bool save_latest = true);
  /// Loads one, at whatever world size and stage; `frozen` and `buffers` of the request are filled in here. What
  /// save_checkpoint() was given as `client_state` are the result's attributes. Nothing where the folder has no
  /// `latest` and no tag was asked for. All ranks call it; see EngineCore::load_checkpoint.
  std::optional<LoadedCheckpoint> load_checkpoint(LoadRequest request);

  [[nodiscard]] bool is_gradient_accumulation_boundary() const noexcept { return core_.is_boundary(); }
  [[nodiscard]] std::optional<double> grad_norm() const noexcept { return core_.grad_norm(); }
  /// The learning rate of each group that the next step uses.
  [[nodiscard]] std::vector<double> lrs() const;
  /// Sets a group's values for the steps to come. Throws ConfigError for a group that is not there.
  void set_hyperparameters(std::size_t group, const kernels::Hyperparameters& hyper);
  [[nodiscard]] const Counters& counters() const noexcept { return core_.counters(); }
  [[nodiscard]] const BatchSizes& batch() const noexcept { return core_.batch(); }
  [[nodiscard]] EngineCore& core() noexcept { return core_; }
  [[nodiscard]] torch::nn::Module& module() noexcept { return *module_; }

 private:
  void use_schedule();
  [[nodiscard]] std::vector<NamedTensor> frozen() const;
  [[nodiscard]] std::vector<NamedTensor> buffers() const;

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<kernels::Hyperparameters> hyper_;
  std::optional<Schedule> schedule_;
  BatchSizes batch_;  ///< As the core starts.
  EngineCore core_;
  UnitTable units_;
};

/// Where the configuration wants a model trained ("pannier.device"): this process's GPU (LOCAL_RANK says which) where
/// there is one, else the CPU. For `module->to(...)` before initialize(). Throws ConfigError where "cuda" is demanded
/// and torch sees no GPU.
[[nodiscard]] c10::Device training_device(const Config& config);

/// Makes an engine for `module` with the optimizer and schedule of the configuration. The module's parameters become
/// views of the engine's buckets, in the configured type. Throws ConfigError, OutOfMemoryError or CollectiveError
/// before anything is changed.
[[nodiscard]] std::unique_ptr<Engine> initialize(std::shared_ptr<torch::nn::Module> module, const Config& config,
                                                 InitializeOptions options = {});

/// The same for a module holder, such as those that TORCH_MODULE makes.
template <class Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
[[nodiscard]] std::unique_ptr<Engine> initialize(const Holder& holder, const Config& config,
                                                 InitializeOptions options = {}) {
  return initialize(std::shared_ptr<torch::nn::Module>(holder.ptr()), config, std::move(options));
}

}  // namespace pannier
