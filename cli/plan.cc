// pannier plan: the memory and time that training will take, for a model and a machine that need not be there.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/commands.h"
#include "cli/encoder_model.h"
#include "cli/plan_times.h"
#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/engine/engine_core.h"

namespace pannier::cli {
namespace {

struct PlanFlags {
  std::string config;
  double parameters = 0;
  EncoderSize model;
  std::string device_memory;
  std::string host_memory;
  std::string activations;
  TimeFlags times;
};

/// A block of a model that is known by its number of parameters alone.
constexpr std::int64_t kUnknownTensorNumel = std::int64_t{1} << 20;
/// Keeps the list of blocks short, for a model of any size.
constexpr std::int64_t kMostBlocks = 1'000'000;
/// More than any model has; above it sizes in bytes would overflow.
constexpr double kMostParameters = 1e15;

std::vector<std::int64_t> numels_of(const PlanFlags& flags) {
  std::vector<std::int64_t> numels;
  if (flags.parameters > 0) {
    const auto total = static_cast<std::int64_t>(flags.parameters);
    const std::int64_t block = std::max(kUnknownTensorNumel, total / kMostBlocks);
    for (std::int64_t done = 0; done < total; done += block) {
      numels.push_back(std::min(block, total - done));
    }
    return numels;
  }
  const EncoderSize& m = flags.model;
  numels.push_back(m.vocabulary * m.width);
  for (std::int64_t i = 0; i < m.layers; ++i) {
    for (const std::int64_t numel :
         {3 * m.width * m.width, 3 * m.width, m.width * m.width, m.width, m.width * m.feed_forward, m.feed_forward,
          m.feed_forward * m.width, m.width, m.width, m.width, m.width, m.width}) {
      numels.push_back(numel);
    }
  }
  numels.push_back(m.width * m.vocabulary);
  numels.push_back(m.vocabulary);
  return numels;
}

void run(const PlanFlags& flags) {
  if (std::isnan(flags.parameters)) {  // A range check lets it pass.
    throw ConfigError("--parameters must be a number, not nan");
  }
  const Config config = Config::from_file(flags.config);
  if (!config.optimizer) {
    throw ConfigError(fmt::format("{}: a plan needs an optimizer section", flags.config));
  }
  config.require_supported();
  const auto numels = numels_of(flags);
  const PartsOptions options = parts_options(config, config.optimizer->algorithm, {config.optimizer->hyper},
                                             config.gradient_accumulation_steps.value_or(1));
  MemoryPlanInput input = plan_input(options, numels, 0, 0, 1);
  input.micro_batch_size = config.train_micro_batch_size_per_gpu.value_or(0);
  input.activations_nbytes = flags.activations.empty() ? 0 : parse_bytes(flags.activations);
  MemoryBudget budget{.device_nbytes = config.pannier.device_memory_nbytes.value_or(0),
                      .host_nbytes = config.pannier.host_memory_nbytes.value_or(0)};
  budget.device_nbytes = flags.device_memory.empty() ? budget.device_nbytes : parse_bytes(flags.device_memory);
  budget.host_nbytes = flags.host_memory.empty() ? budget.host_nbytes : parse_bytes(flags.host_memory);
  fmt::print("{} parameters{}, {}, stage {}\n{}", input.parameter_numel,
             flags.parameters > 0 ? "" : " (the model of `pannier train`; see --parameters)", to_string(config.dtype),
             config.zero.stage, format_plan_table(plan_times(config, input, budget, flags.times)));
  require_fit(input, budget);
}

}  // namespace

void add_plan(CLI::App& app) {
  auto* command =
      app.add_subcommand("plan", "Print the memory and time that training will take, before anything is allocated");
  command->footer(
      "Examples:\n  pannier plan --config ds_config.json --parameters 7e9 --vram 24GiB --ram 128GiB\n"
      "  pannier plan --config ds_config.json --parameters 7e9 --vram 24GiB --ram 128GiB --pcie 25 --dram 80 "
      "--cores-rate 2 --tokens 16384 --tflops 150 --recompute\n"
      "  pannier plan --config ds_config.json --layers 12 --width 2048");
  auto flags = std::make_shared<PlanFlags>();
  command->add_option("--config", flags->config, "DeepSpeed JSON")->required();
  command->add_option("--parameters", flags->parameters, "Number of parameters, instead of the model's sizes")
      ->check(CLI::Range(1.0, kMostParameters));
  add_model_flags(*command, flags->model, CLI::PositiveNumber);
  command->add_option("--vram", flags->device_memory, "Device memory, such as 24GiB");
  command->add_option("--ram", flags->host_memory, "Host memory, such as 64GiB");
  command->add_option("--activations", flags->activations, "Peak of one micro-batch's activations, such as 8GiB");
  add_time_flags(*command, flags->times);
  command->callback([flags] { run(*flags); });
}

}  // namespace pannier::cli
