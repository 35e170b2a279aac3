#include "pannier/binding/classes.h"

#include <array>
#include <chrono>

#include "pannier/comm/c10d_group.h"

namespace pannier::binding {
namespace {

EngineInputs to_inputs(const std::string& rule, std::vector<std::string> names, std::vector<at::Tensor> parameters,
                       const std::vector<std::int64_t>& group_of, const c10::List<Numbers>& groups,
                       std::vector<at::Tensor> buffers, const std::string& device) {
  EngineInputs inputs;
  inputs.names = std::move(names);
  inputs.parameters = std::move(parameters);
  for (const auto group : group_of) {
    inputs.group_of.push_back(static_cast<int>(group));
  }
  inputs.groups = to_hyperparameters(groups);
  inputs.algorithm = algorithm_of(rule);
  inputs.buffers = std::move(buffers);
  if (!device.empty()) {
    inputs.device = c10::Device(device);
  }
  return inputs;
}

Schedule read_schedule(const std::string& type, const std::string& params_json, std::vector<double> base_lrs) {
  const std::string text = fmt::format(R"({{"scheduler": {{"type": "{}", "params": {}}}}})", type, params_json);
  const Config config = Config::from_text(text);
  config.require_resolved(false, true);
  return Schedule(config.scheduler->type, config.scheduler->options, std::move(base_lrs));
}

}  // namespace

std::optional<kernels::Algorithm> algorithm_of(const std::string& rule) {
  static constexpr std::array<std::pair<const char*, kernels::Algorithm>, 5> kRules{
      {{"AdamW", kernels::Algorithm::kAdamW},
       {"Adam", kernels::Algorithm::kAdam},
       {"SGD", kernels::Algorithm::kSgd},
       {"Adagrad", kernels::Algorithm::kAdagrad},
       {"Lion", kernels::Algorithm::kLion}}};
  for (const auto& [name, algorithm] : kRules) {
    if (rule == name) {
      return algorithm;
    }
  }
  if (rule.empty()) {
    return std::nullopt;
  }
  throw ConfigError(fmt::format("no update rule is called '{}'; expected AdamW, Adam, SGD, Adagrad or Lion", rule));
}

std::vector<kernels::Hyperparameters> to_hyperparameters(const c10::List<Numbers>& groups) {
  std::vector<kernels::Hyperparameters> result;
  for (const Numbers group : groups) {
    kernels::Hyperparameters hyper;
    const auto read = [&group](const char* key, double& value) { value = group.contains(key) ? group.at(key) : value; };
    read("lr", hyper.lr);
    read("beta1", hyper.beta1);
    read("beta2", hyper.beta2);
    read("eps", hyper.eps);
    read("weight_decay", hyper.weight_decay);
    read("momentum", hyper.momentum);
    read("dampening", hyper.dampening);
    read("lr_decay", hyper.lr_decay);
    hyper.nesterov = group.contains("nesterov") && group.at("nesterov") != 0;
    hyper.bias_correction = !group.contains("bias_correction") || group.at("bias_correction") != 0;
    result.push_back(hyper);
  }
  return result;
}

ConfigHolder::ConfigHolder(const std::string& text) : config(translated([&] { return Config::from_text(text); })) {}

void ConfigHolder::resolve_batch(std::int64_t world_size, std::int64_t loader_batch) {
  const auto known = loader_batch > 0 ? std::optional<std::int64_t>(loader_batch) : std::nullopt;
  batch = translated([&] { return config.resolve_batch(static_cast<int>(world_size), known); });
  if (batch.complete) {
    config.train_batch_size = batch.train;
    config.train_micro_batch_size_per_gpu = batch.micro;
    config.gradient_accumulation_steps = batch.accumulation;
    config.auto_batch = {};
  }
}

void ConfigHolder::require_resolved(bool builds_optimizer, bool builds_schedule) const {
  translated([&] { config.require_resolved(builds_optimizer, builds_schedule); });
}

ScheduleHolder::ScheduleHolder(const std::string& type, const std::string& params_json, std::vector<double> base_lrs)
    : schedule(translated([&] { return read_schedule(type, params_json, std::move(base_lrs)); })) {}

EngineHolder::EngineHolder(const c10::intrusive_ptr<ConfigHolder>& config, const std::string& rule,
                           std::vector<std::string> names, std::vector<at::Tensor> parameters,
                           const std::vector<std::int64_t>& group_of, const c10::List<Numbers>& groups,
                           std::vector<at::Tensor> buffers, const std::string& device,
                           const std::vector<std::vector<std::int64_t>>& units, std::vector<at::Tensor> shares,
                           const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& ranks)
    : core(translated([&] {
        EngineInputs inputs =
            to_inputs(rule, std::move(names), std::move(parameters), group_of, groups, std::move(buffers), device);
        inputs.units = units;
        inputs.shares = std::move(shares);
        if (ranks) {
          const double seconds = config->config.pannier.collective_timeout_seconds;
          GroupOptions options;
          options.collective_timeout = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
          inputs.communicator = make_c10d_communicator(*ranks, options);
        }
        return EngineCore(config->config, std::move(inputs), config->batch);
      })) {}

}  // namespace pannier::binding
