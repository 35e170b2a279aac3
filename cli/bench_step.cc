// pannier bench step: whole training steps with optimizer states on the device and on the host, and how busy each way
// and the host's update were meanwhile.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <array>
#include <chrono>
#include <memory>

#include "cli/bench.h"
#include "cli/encoder_model.h"
#include "pannier/base/units.h"
#include "pannier/engine/engine.h"

namespace pannier::cli {
namespace {

constexpr int kWarmUpSteps = 6;  // The planner has solved the split by then.

struct StepFlags {
  EncoderSize model;
  std::int64_t batch = 8;
  std::int64_t sequence = 128;
  int steps = 10;
};

/// What a row of the trace did in all traced steps.
struct Busy {
  double seconds = 0;
  double nbytes = 0;
};

struct Measured {
  double step_s = 0;
  std::size_t peak_nbytes = 0;
  std::array<Busy, kNumTraceRows> rows{};
  LinkAndHostRates rates;
};

void synchronize(Engine& engine) {
  engine.core().synchronize();
  engine.core().device().record(Queue::kCompute)->wait();
}

Measured measure(const StepFlags& flags, const char* home) {
  const Config config = Config::from_text(fmt::format(
      R"({{"train_batch_size": {}, "optimizer": {{"type": "AdamW"}}, "gradient_clipping": 1.0, "bf16": {{"enabled": true}},
          "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "{}"}}}}}})",
      flags.batch, home));
  torch::manual_seed(1);
  EncoderModel model(flags.model);
  const c10::Device place = training_device(config);
  model->to(place);
  const auto engine = initialize(model, config);
  const auto options = at::TensorOptions().dtype(at::kLong).device(place);
  const auto tokens = at::randint(flags.model.vocabulary, {flags.batch, flags.sequence}, options);
  const auto labels = at::randint(flags.model.vocabulary, {flags.batch}, options);
  const auto run = [&] {
    engine->begin_unit(0);
    engine->backward(at::cross_entropy_loss(model->forward(tokens), labels));
    engine->step();
  };
  for (int i = 0; i < kWarmUpSteps; ++i) {
    run();
  }
  Device& device = engine->core().device();
  Measured measured;
  measured.rates = machine_rates(device).rates;
  synchronize(*engine);
  engine->core().reset_peaks();
  device.trace().start();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < flags.steps; ++i) {
    run();
  }
  synchronize(*engine);
  measured.step_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / flags.steps;
  for (const TraceSpan& span : device.trace().take()) {
    Busy& row = measured.rows[static_cast<std::size_t>(span.row)];
    row.seconds += span.end_s - span.begin_s;
    row.nbytes += static_cast<double>(span.label.nbytes);
  }
  measured.peak_nbytes = device.memory().peak;
  return measured;
}

void print_way(const char* what, const Busy& busy, double probed, const Measured& all, int steps) {
  const double rate = busy.nbytes / std::max(busy.seconds, 1e-9);
  const std::string share = probed > 0 ? fmt::format(", {} of the probe's rate", percent_of(rate, probed)) : "";
  fmt::print("  {:<16}{:>10} a step, busy {:>4} of the time at {:.1f} GB/s{}\n", what,
             format_bytes(static_cast<std::size_t>(busy.nbytes / steps)), percent_of(busy.seconds / steps, all.step_s),
             rate / 1e9, share);
}

void bench_step(const StepFlags& flags) {
  if (flags.model.width % flags.model.heads != 0) {
    throw ConfigError(fmt::format("--heads {} must divide --width {} evenly", flags.model.heads, flags.model.width));
  }
  const Measured resident = measure(flags, "none");
  fmt::print("states on the device: {:.4f} s a step, peak {}\n", resident.step_s, format_bytes(resident.peak_nbytes));
  const Measured offloaded = measure(flags, "cpu");
  fmt::print("states on the host:   {:.4f} s a step, peak {}: {} of the speed\n", offloaded.step_s,
             format_bytes(offloaded.peak_nbytes), percent_of(resident.step_s, offloaded.step_s));
  const auto row = [&](TraceRow which) { return offloaded.rows[static_cast<std::size_t>(which)]; };
  print_way("host to device", row(TraceRow::kUp), offloaded.rates.up, offloaded, flags.steps);
  print_way("device to host", row(TraceRow::kDown), offloaded.rates.down, offloaded, flags.steps);
  fmt::print("  {:<16}{:>10}         busy {:>4} of the time\n", "host updates", "",
             percent_of(row(TraceRow::kHostUpdates).seconds / flags.steps, offloaded.step_s));
}

}  // namespace

void add_bench_step(CLI::App& bench) {
  auto* command = bench.add_subcommand("step", "Training steps with and without offload of the optimizer states");
  command->footer("Example:\n  pannier bench step --layers 2 --width 512 --batch 4");
  auto flags = std::make_shared<StepFlags>();
  add_model_flags(*command, flags->model, CLI::PositiveNumber);
  for (const auto& [flag, value] : {std::pair{"--heads", &flags->model.heads}, std::pair{"--batch", &flags->batch},
                                    std::pair{"--sequence", &flags->sequence}}) {
    command->add_option(flag, *value)->check(CLI::PositiveNumber)->capture_default_str();
  }
  command->add_option("--steps", flags->steps, "Steps to measure")->check(CLI::PositiveNumber)->capture_default_str();
  command->callback([flags] { bench_step(*flags); });
}

}  // namespace pannier::cli
