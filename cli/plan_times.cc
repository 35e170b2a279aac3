#include "cli/plan_times.h"

#include <fmt/format.h>

#include <cmath>
#include <numeric>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/rates.h"
#include "pannier/optim/update_rate.h"

namespace pannier::cli {
namespace {

void require_numbers(const TimeFlags& flags) {
  for (const auto& [name, value] : {std::pair<const char*, double>{"--pcie", flags.pcie},
                                    {"--dram", flags.dram},
                                    {"--cores-rate", flags.cores_rate},
                                    {"--hbm", flags.hbm},
                                    {"--tokens", flags.tokens},
                                    {"--tflops", flags.tflops},
                                    {"--forward-ms", flags.forward_ms},
                                    {"--backward-ms", flags.backward_ms}}) {
    if (!std::isfinite(value)) {  // A range check lets it pass.
      throw ConfigError(fmt::format("{} must be a finite number, not {}", name, value));
    }
  }
}

// Fills in what was given, and measures here what was not.
void find_rates(const TimeFlags& flags, PlanTable& table) {
  MeasuredRates here;
  if (flags.dram == 0 || flags.cores_rate == 0) {
    const MachineIdentity machine = identify_machine({});
    ThreadTeam team(machine.num_cores);
    const ParallelFor parallel = team.parallel_for();
    here = cached_rates(rates_cache_folder(), machine,
                        {.parallel_for = parallel, .host_update = [&](double most_seconds) {
                           return measure_update_rate(parallel, {.most_seconds = most_seconds});
                         }});
  }
  const auto choose = [&](double given, double measured, double& rate, RateOrigin& origin) {
    rate = given > 0 ? given * 1e9 : measured;
    origin = given > 0 ? RateOrigin::kGiven : rate > 0 ? here.origin : RateOrigin::kUnknown;
  };
  choose(flags.pcie, 0, table.rates.up, table.origins.link);
  table.rates.down = table.rates.up;
  choose(flags.dram, here.rates.dram, table.rates.dram, table.origins.dram);
  choose(flags.cores_rate, here.rates.host_update, table.rates.host_update, table.origins.host_update);
  choose(flags.hbm, 0, table.rates.device_copy, table.origins.device_copy);
}

StepObservation observation_of(const TimeFlags& flags, std::int64_t numel, std::int64_t micro_batches) {
  StepObservation observation =
      predict_compute(numel, flags.tokens / static_cast<double>(micro_batches), flags.tflops * 1e12, flags.recompute);
  if (flags.forward_ms > 0) {
    observation.forward_s = flags.forward_ms / 1e3;
  }
  if (flags.backward_ms > 0) {
    observation.backward_s = flags.backward_ms / 1e3;
  }
  return observation;
}

// Without a link there is nowhere to stream to: all is updated on the host.
void find_split(const MemoryPlanInput& input, const MemoryBudget& budget, bool overlap_step, PlanTable& table) {
  const auto numel = std::accumulate(input.bucket_numels.begin(), input.bucket_numels.end(), std::int64_t{0});
  const bool rests_on_host = !input.is_partitioned.empty() && input.parameter_home == Home::kHost;
  SplitInput split = split_input(input.shape, numel, input.accumulates, rests_on_host);
  split.overlap_step = overlap_step;
  split.micro_batches = table.micro_batches;
  split.observation = table.observation;
  split.rates = table.rates;
  const std::size_t at_peak = table.memory.device_parameters + table.memory.device_activations;
  if (budget.device_nbytes > 0 && table.memory.device_activations > 0 && budget.device_nbytes > at_peak) {
    split.slack_nbytes = budget.device_nbytes - at_peak;
  }
  if (budget.device_nbytes > 0) {
    const std::size_t parameters = table.memory.device_parameters;
    split.room_nbytes = budget.device_nbytes > parameters ? budget.device_nbytes - parameters : 0;
  }
  table.split = table.rates.up > 0 ? solve_split(split) : evaluate_split(split, 0.0);
  table.routes = assign_routes(
      input.bucket_numels, {.host = table.split->host_share, .most_streamed_numel = table.split->most_streamed_numel});
}

}  // namespace

void add_time_flags(CLI::App& command, TimeFlags& flags) {
  command.add_option("--pcie", flags.pcie, "Link between host and device, GB/s each way")->check(CLI::PositiveNumber);
  command.add_option("--dram", flags.dram, "Host memory, GB/s read and written; not given: this machine's")
      ->check(CLI::PositiveNumber);
  command.add_option("--cores-rate", flags.cores_rate, "Update on the host, G parameters/s; not given: this machine's")
      ->check(CLI::PositiveNumber);
  command.add_option("--hbm", flags.hbm, "Device memory, GB/s read and written")->check(CLI::PositiveNumber);
  command.add_option("--tokens", flags.tokens, "Tokens a step")->check(CLI::PositiveNumber);
  command.add_option("--tflops", flags.tflops, "What training reaches, TFLOP/s")->check(CLI::PositiveNumber);
  command.add_flag("--recompute", flags.recompute, "Activations are computed anew in backward");
  command.add_option("--forward-ms", flags.forward_ms, "Of one micro-batch, instead of --tokens and --tflops")
      ->check(CLI::PositiveNumber);
  command.add_option("--backward-ms", flags.backward_ms, "Of one micro-batch")->check(CLI::PositiveNumber);
  command.add_flag("--overlap-step", flags.overlap_step, "The next forward may begin before the host's update is done");
}

PlanTable plan_times(const Config& config, const MemoryPlanInput& input, const MemoryBudget& budget,
                     const TimeFlags& flags) {
  require_numbers(flags);
  PlanTable table{.memory = plan_memory(input),
                  .optimizer_home = input.optimizer_home,
                  .bucket_numels = input.bucket_numels,
                  .micro_batches = config.gradient_accumulation_steps.value_or(1)};
  table.observation = observation_of(flags, input.parameter_numel, table.micro_batches);
  if (input.optimizer_home == Home::kHost) {
    find_rates(flags, table);
    find_split(input, budget, flags.overlap_step || config.pannier.overlap_step, table);
  }
  return table;
}

}  // namespace pannier::cli
