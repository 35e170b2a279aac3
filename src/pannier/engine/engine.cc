#include "pannier/engine/engine.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <cstdlib>
#include <unordered_map>
#include <unordered_set>

#include "pannier/base/error.h"
#include "pannier/base/log.h"

namespace pannier {
namespace {

std::vector<ParameterGroup> one_group(const torch::nn::Module& module, const kernels::Hyperparameters& hyper) {
  return {{module.parameters(), hyper}};
}

std::vector<double> lrs_of(const std::vector<kernels::Hyperparameters>& groups) {
  std::vector<double> lrs;
  for (const auto& group : groups) {
    lrs.push_back(group.lr);
  }
  return lrs;
}

std::vector<const torch::nn::Module*> addresses_of(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::vector<const torch::nn::Module*> addresses;
  for (const auto& module : modules) {
    addresses.push_back(module.get());
  }
  return addresses;
}

// Every parameter once, by the first of its names.
std::vector<NamedTensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> distinct;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      distinct.push_back({item.key(), item.value()});
    }
  }
  return distinct;
}

std::vector<std::vector<std::int64_t>> units_in(const torch::nn::Module& module, const InitializeOptions& options) {
  std::vector<at::Tensor> parameters;
  for (const auto& named : distinct_parameters(module)) {
    parameters.push_back(named.tensor);
  }
  return parameters_of_units(module, addresses_of(options.units), parameters);
}

// Names every parameter and finds its group.
EngineInputs inputs_of(const torch::nn::Module& module, const Config& config, InitializeOptions& options) {
  const std::vector<ParameterGroup>& groups = options.groups;
  EngineInputs inputs;
  std::unordered_map<const c10::TensorImpl*, int> group_of;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    inputs.groups.push_back(groups[g].hyper);
    for (const auto& parameter : groups[g].parameters) {
      if (!group_of.emplace(parameter.unsafeGetTensorImpl(), static_cast<int>(g)).second) {
        throw ConfigError(fmt::format("a parameter of {} elements is in two parameter groups, or twice in group {}",
                                      parameter.numel(), g));
      }
    }
  }
  for (const auto& [name, parameter] : distinct_parameters(module)) {
    const auto group = group_of.extract(parameter.unsafeGetTensorImpl());
    inputs.names.push_back(name);
    inputs.parameters.push_back(parameter);
    inputs.group_of.push_back(group.empty() ? -1 : group.mapped());
  }
  if (!group_of.empty()) {
    throw ConfigError(fmt::format("{} of the given parameters are not the module's", group_of.size()));
  }
  inputs.buffers = module.buffers();
  if (!options.units.empty()) {
    inputs.units = units_in(module, options);
  }
  if (options.init) {
    inputs.shares = options.init->shares_of(inputs.parameters);
  }
  inputs.communicator = options.init ? options.init->take_communicator() : std::move(options.communicator);
  if (config.optimizer) {
    inputs.algorithm = config.optimizer->algorithm;
    inputs.initial_accumulator_value = config.optimizer->initial_accumulator_value;
  }
  return inputs;
}

BatchSizes batch_of(const Config& config, const InitializeOptions& options) {
  if (options.init && options.communicator != nullptr) {
    throw ConfigError("initialize() was given ranks twice: by `communicator` and by `init`");
  }
  const int world_size = options.init                      ? options.init->world_size()
                         : options.communicator == nullptr ? 1
                                                           : options.communicator->world_size();
  const BatchSizes batch = config.resolve_batch(world_size, std::nullopt);
  if (!batch.complete) {
    throw ConfigError("train_micro_batch_size_per_gpu is \"auto\", which needs a data loader; write the number");
  }
  return batch;
}

std::vector<ParameterGroup> or_default(const torch::nn::Module& module, const Config& config,
                                       std::vector<ParameterGroup> groups) {
  config.require_resolved(config.optimizer.has_value(), config.scheduler.has_value());
  return groups.empty() && config.optimizer ? one_group(module, config.optimizer->hyper) : std::move(groups);
}

std::vector<kernels::Hyperparameters> hyper_of(const std::vector<ParameterGroup>& groups) {
  std::vector<kernels::Hyperparameters> result;
  for (const auto& group : groups) {
    result.push_back(group.hyper);
  }
  return result;
}

}  // namespace

Engine::Engine(std::shared_ptr<torch::nn::Module> module, const Config& config, InitializeOptions options)
    : module_(std::move(module)),
      hyper_(hyper_of(options.groups)),
      schedule_(config.scheduler ? std::optional<Schedule>(std::in_place, config.scheduler->type,
                                                           config.scheduler->options, lrs_of(hyper_))
                                 : std::nullopt),
      batch_(batch_of(config, options)),
      core_(config, inputs_of(*module_, config, options), batch_),
      units_(core_, *module_, addresses_of(options.units)) {
  if (core_.overlaps() && !options.units.empty()) {
    core_.set_units(units_in(*module_, options));
  }
  use_schedule();
}

void Engine::use_schedule() {
  if (!schedule_) {
    return;
  }
  for (std::size_t i = 0; i < hyper_.size(); ++i) {
    hyper_[i].lr = schedule_->lrs()[i];
    if (!schedule_->momenta().empty()) {
      std::tie(hyper_[i].beta1, hyper_[i].beta2) = schedule_->momenta()[i];
    }
  }
}

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph) {
  auto [reported, scaled] = core_.begin_backward(loss, true);
  try {
    scaled.backward({}, retain_graph);
  } catch (const std::exception& error) {
    core_.abort_backward(error.what());
    throw;
  }
  core_.end_backward();
  return reported;
}

StepOutcome Engine::step() {
  const StepOutcome outcome = core_.step(hyper_);
  if (outcome == StepOutcome::kApplied && schedule_) {
    schedule_->step();
    use_schedule();
  }
  return outcome;
}

std::vector<double> Engine::lrs() const { return lrs_of(hyper_); }

void Engine::set_hyperparameters(std::size_t group, const kernels::Hyperparameters& hyper) {
  if (group >= hyper_.size()) {
    throw ConfigError(fmt::format("parameter group {} of {}", group, hyper_.size()));
  }
  hyper_[group] = hyper;
}

c10::Device training_device(const Config& config) {
  const bool has_gpu = at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0;
  if (config.pannier.device == "cuda" && !has_gpu) {
    throw ConfigError("pannier.device is \"cuda\", but torch sees no GPU");
  }
  if (config.pannier.device == "cpu" || !has_gpu) {
    return {c10::DeviceType::CPU};
  }
  const char* rank = std::getenv("LOCAL_RANK");
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank == nullptr ? 0 : std::atoi(rank))};
}

std::unique_ptr<Engine> initialize(std::shared_ptr<torch::nn::Module> module, const Config& config,
                                   InitializeOptions options) {
  if (module == nullptr) {
    throw ConfigError("initialize() needs a module");
  }
  options.groups = or_default(*module, config, std::move(options.groups));
  auto engine = std::make_unique<Engine>(std::move(module), config, std::move(options));
  for (const auto& note : config.notes) {
    log::info(note);
  }
  return engine;
}

}  // namespace pannier
