// pannier train: trains the encoder model on a file of tokens, with the engine that a configuration describes.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/commands.h"
#include "cli/encoder_model.h"
#include "pannier/base/error.h"
#include "pannier/engine/engine.h"
#include "pannier/engine/metrics.h"

namespace pannier::cli {
namespace {

struct TrainFlags {
  std::string tokens;
  std::string config;
  std::string metrics;
  EncoderSize model;
  std::int64_t sequence = 128;
  std::int64_t steps = 20;
  std::uint64_t seed = 42;
};

/// A file of 16-bit token ids, drawn from at random but in the same order for the same seed.
class TokenFile {
 public:
  TokenFile(const std::string& path, std::int64_t vocabulary, std::int64_t sequence, std::uint64_t seed)
      : sequence_(sequence), random_(seed) {
    if (std::filesystem::is_directory(path)) {
      throw IoError(fmt::format("open tokens {}", path), EISDIR);
    }
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) {
      throw IoError(fmt::format("open tokens {}", path), errno);
    }
    if (!std::filesystem::is_regular_file(path)) {
      throw ConfigError(fmt::format("{} is not a regular file, so it can't hold tokens", path));
    }
    const auto nbytes = static_cast<std::size_t>(file.tellg());
    if (nbytes % sizeof(std::uint16_t) != 0) {
      throw ConfigError(fmt::format("{} holds {} bytes, but tokens of 16 bits take an even number", path, nbytes));
    }
    tokens_.resize(nbytes / sizeof(std::uint16_t));
    file.seekg(0);
    file.read(reinterpret_cast<char*>(tokens_.data()),
              static_cast<std::streamsize>(tokens_.size() * sizeof(std::uint16_t)));
    if (tokens_.size() <= static_cast<std::size_t>(sequence)) {
      throw ConfigError(fmt::format("{} holds {} tokens, but a window takes {}", path, tokens_.size(), sequence + 1));
    }
    for (const auto token : tokens_) {
      if (token >= vocabulary) {
        throw ConfigError(fmt::format("{} holds token {}, but the vocabulary is {}", path, token, vocabulary));
      }
    }
  }

  /// Windows of (batch, sequence) tokens and the token after each.
  std::pair<at::Tensor, at::Tensor> next(std::int64_t batch) {
    at::Tensor windows = at::empty({batch, sequence_}, at::kLong);
    at::Tensor labels = at::empty({batch}, at::kLong);
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto start = random_() % (tokens_.size() - static_cast<std::size_t>(sequence_));
      for (std::int64_t i = 0; i < sequence_; ++i) {
        windows[b].data_ptr<std::int64_t>()[i] = tokens_[start + static_cast<std::size_t>(i)];
      }
      labels.data_ptr<std::int64_t>()[b] = tokens_[start + static_cast<std::size_t>(sequence_)];
    }
    return {windows, labels};
  }

 private:
  std::int64_t sequence_;
  std::mt19937_64 random_;
  std::vector<std::uint16_t> tokens_;
};

void show_progress(std::int64_t step, std::int64_t steps, double loss, double seconds) {
  constexpr std::int64_t kWidth = 30;
  const std::int64_t filled = kWidth * step / steps;
  fmt::print(stderr, "\r[{:#<{}}{: <{}}] step {}/{}  loss {:.4f}  {:.2f} s/step ", "", filled, "", kWidth - filled,
             step, steps, loss, seconds);
  if (step == steps) {
    fmt::print(stderr, "\n");
  }
}

std::string metrics_line(Engine& engine, std::int64_t step, double loss, double seconds) {
  nlohmann::ordered_json line{{"step", step}, {"loss", loss}, {"seconds", seconds}, {"lr", engine.lrs()}};
  line["grad_norm"] =
      engine.grad_norm() && std::isfinite(*engine.grad_norm()) ? nlohmann::ordered_json(*engine.grad_norm()) : nullptr;
  line["loss_scale"] = engine.core().loss_scaler().scale();
  line["skipped_steps"] = engine.counters().skipped_steps;
  line["memory"] = nlohmann::ordered_json::parse(memory_stats_json(engine.core()));
  return line.dump();
}

void run(const TrainFlags& flags) {
  const Config config = Config::from_file(flags.config);
  if (!config.optimizer) {
    throw ConfigError(fmt::format("{}: training needs an optimizer section", flags.config));
  }
  if (flags.model.width % flags.model.heads != 0) {
    throw ConfigError(fmt::format("--heads {} must divide --width {} evenly", flags.model.heads, flags.model.width));
  }
  TokenFile data(flags.tokens, flags.model.vocabulary, flags.sequence, flags.seed);
  std::ofstream metrics;
  if (!flags.metrics.empty()) {
    metrics.open(flags.metrics);
    if (!metrics) {
      throw IoError(fmt::format("open metrics {}", flags.metrics), errno);
    }
  }
  torch::manual_seed(flags.seed);
  EncoderModel model(flags.model);
  const c10::Device device = training_device(config);
  model->to(device);
  const auto engine = initialize(model, config);
  fmt::print("{}", format_plan(engine->core().plan(), engine->core().optimizer_home()));
  const bool on_terminal = isatty(STDERR_FILENO) != 0;
  for (std::int64_t step = 1; step <= flags.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    double loss = 0;
    for (std::int64_t micro = 0; micro < engine->batch().accumulation; ++micro) {
      const auto [windows, labels] = data.next(engine->batch().micro);
      loss += engine->backward(at::cross_entropy_loss(model->forward(windows.to(device)), labels.to(device)))
                  .item<double>();
      engine->step();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (metrics.is_open()) {
      metrics << metrics_line(*engine, step, loss, seconds) << std::endl;
      if (!metrics) {
        throw IoError(fmt::format("write metrics {}", flags.metrics), errno);
      }
    }
    if (on_terminal) {
      show_progress(step, flags.steps, loss, seconds);
    } else {
      fmt::print("step {} loss {:.4f} {:.2f} s\n", step, loss, seconds);
    }
  }
}

}  // namespace

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train an encoder model on a file of tokens");
  command->footer(
      "Examples:\n  pannier train --tokens tokens.bin --config ds_config.json --metrics run.jsonl\n"
      "  pannier train --tokens tokens.bin --config ds_config.json --layers 2 --width 256 --heads 4 --steps 100");
  auto flags = std::make_shared<TrainFlags>();
  command->add_option("--tokens", flags->tokens, "File of little-endian 16-bit token ids")->required();
  command->add_option("--config", flags->config, "DeepSpeed JSON")->required();
  command->add_option("--metrics", flags->metrics, "Write one JSON line a step to this file");
  add_model_flags(*command, flags->model, CLI::Range(1, 65536));  // Tokens have 16 bits.
  command->add_option("--heads", flags->model.heads)->check(CLI::PositiveNumber)->capture_default_str();
  command->add_option("--sequence", flags->sequence, "Tokens of a window")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--steps", flags->steps, "Optimizer steps")->check(CLI::PositiveNumber)->capture_default_str();
  command->add_option("--seed", flags->seed, "Of weights, dropout and the order of data")->capture_default_str();
  command->callback([flags] { run(*flags); });
}

}  // namespace pannier::cli
