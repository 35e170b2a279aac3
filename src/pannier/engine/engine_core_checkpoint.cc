// Saving and loading: what the core adds to the tensors, and the moments at which it may be done.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/engine/checkpoint_loader.h"
#include "pannier/engine/checkpoint_saver.h"
#include "pannier/engine/engine_core.h"
#include "pannier/engine/shared_outcome.h"

namespace pannier {
namespace {

constexpr std::array<const char*, 5> kAlgorithmNames{"AdamW", "Adam", "SGD", "Adagrad", "Lion"};

using Attributes = std::map<std::string, std::string>;

std::string algorithm_name(kernels::Algorithm algorithm) {
  return kAlgorithmNames.at(static_cast<std::size_t>(algorithm));
}

// A number's shortest text that gives back the same number.
template <class Number>
void put(Attributes& attributes, const std::string& key, Number value) {
  attributes[key] = fmt::format("{}", value);
}

template <class Number>
void get(const Attributes& attributes, const std::string& key, Number& value) {
  const auto found = attributes.find(key);
  if (found == attributes.end()) {
    return;
  }
  const std::string& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw IoError(fmt::format("the checkpoint's attribute {} is '{}', a number was expected", key, text), EBADMSG);
  }
}

void put_groups(Attributes& attributes, const std::vector<kernels::Hyperparameters>& groups) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto put_value = [&](const char* key, double value) {
      put(attributes, fmt::format("group.{}.{}", g, key), value);
    };
    put_value("lr", groups[g].lr);
    put_value("beta1", groups[g].beta1);
    put_value("beta2", groups[g].beta2);
    put_value("eps", groups[g].eps);
    put_value("weight_decay", groups[g].weight_decay);
    put_value("momentum", groups[g].momentum);
  }
  put(attributes, "groups", groups.size());
}

}  // namespace

Attributes EngineCore::own_attributes(const std::vector<kernels::Hyperparameters>& groups) const {
  Attributes attributes;
  attributes["dtype"] = to_string(config_.dtype);
  put(attributes, "stage", config_.zero.stage);
  put(attributes, "counters.global_steps", counters_.global_steps);
  put(attributes, "counters.micro_steps", counters_.micro_steps);
  put(attributes, "counters.skipped_steps", counters_.skipped_steps);
  put(attributes, "counters.global_samples", counters_.global_samples);
  const LossScalerState& scaler = scaler_.state();
  put(attributes, "scaler.scale", scaler.scale);
  put(attributes, "scaler.iteration", scaler.iteration);
  put(attributes, "scaler.last_overflow_iteration", scaler.last_overflow_iteration);
  put(attributes, "scaler.hysteresis_left", scaler.hysteresis_left);
  put(attributes, "scaler.skipped_in_a_row", scaler.skipped_in_a_row);
  put_groups(attributes, groups);
  if (parts_ != nullptr) {
    attributes["optimizer"] = algorithm_name(algorithm_);
    attributes["optimizer.states"] = fmt::format("{}", fmt::join(parts_->pipeline->state_names(), ","));
    const std::int64_t most = steps_.empty() ? 0 : *std::max_element(steps_.begin(), steps_.end());
    put(attributes, "optimizer.step", most);
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (steps_[i] != most) {  // Few: those that some steps had no gradient for.
        put(attributes, "optimizer.step." + parts_->parameters->name(static_cast<int>(i)), steps_[i]);
      }
    }
  }
  return attributes;
}

// Everything is where it rests, and nothing is on its way.
void EngineCore::rest_for_checkpoint(const char* call) {
  require_open();
  require_whole_step();
  check_disk();
  require_outside_backward(call);
  if (gatherer() != nullptr && gatherer()->is_held()) {
    throw ConfigError(
        fmt::format("{} inside pannier.zero.GatheredParameters is not allowed: leave its block first", call));
  }
  if (parts_ == nullptr) {
    return;
  }
  synchronize();
  take_edits(true);
  if (gatherer() != nullptr) {
    gatherer()->rest_all();
    take_edits(false);
  }
}

std::string EngineCore::save_checkpoint(SavePlace place, const CheckpointContents& contents) {
  finish_checkpoint();
  // Told to all, so that nobody waits for a rank that may not save now.
  (void)done_by_all(*communicator_, "save_checkpoint()", [&] {
    require_loaded();
    require_no_window();
    rest_for_checkpoint("save_checkpoint()");
    return std::string();
  });
  if (place.tag.empty()) {
    place.tag = fmt::format("global_step{}", counters_.global_steps);
  }
  save_ = std::make_unique<CheckpointSave>(
      SaveParts{*device_, *communicator_, *host_memory_, parts_.get()},
      SaveOptions{.validation = config_.tag_validation, .delay_seed = config_.pannier.stress_seed}, place, contents,
      counters_.global_steps, own_attributes(contents.groups));
  if (parts_ != nullptr) {
    parts_->pipeline->begin_at_front();
  }
  const std::string path = save_->path();
  if (!config_.async_checkpoint) {
    finish_checkpoint();
  }
  return path;
}

void EngineCore::refuse_checkpoint(const std::string& why) {
  finish_checkpoint();
  (void)done_by_all(*communicator_, "save_checkpoint()", [&]() -> std::string { throw ConfigError(why); });
}

void EngineCore::finish_checkpoint() {
  if (save_ == nullptr) {
    return;
  }
  const std::unique_ptr<CheckpointSave> save = std::move(save_);
  if (save->snapshot() != nullptr) {
    waited_for_saves_s_ += save->snapshot()->waited_s();
  }
  save->finish();
}

CheckpointStats EngineCore::checkpoint_stats() const {
  const StateSnapshot* snapshot = save_ == nullptr ? nullptr : save_->snapshot();
  return {save_ != nullptr && !save_->has_ended(),
          waited_for_saves_s_ + (snapshot == nullptr ? 0.0 : snapshot->waited_s())};
}

// What became of one that was written beside training is told by the next call; among ranks by all in the same.
void EngineCore::check_save() {
  if (save_ != nullptr && communicator_->world_size() == 1 && save_->has_ended()) {
    finish_checkpoint();
  }
}

void EngineCore::share_save_end() {
  if (save_ == nullptr) {
    return;
  }
  std::int64_t num_ended = save_->has_ended() ? 1 : 0;
  communicator_->sum({&num_ended, 1});
  if (num_ended == communicator_->world_size()) {
    finish_checkpoint();
  }
}

// For changes that no update makes.
void EngineCore::wait_for_snapshot() noexcept {
  if (save_ != nullptr) {
    save_->wait_read();
  }
}

void EngineCore::require_no_window() const {
  if (parts_ != nullptr && (micro_in_window_ > 0 || has_backward_ || parts_->reducer->in_backward())) {
    throw ConfigError(
        fmt::format("save_checkpoint() in the middle of an accumulation window ({} of {} micro-batches have ended): "
                    "its gradients are "
                    "in no checkpoint; save after a step() that ends a window",
                    micro_in_window_, batch_.accumulation));
  }
}

std::optional<LoadedCheckpoint> EngineCore::load_checkpoint(const LoadRequest& request) {
  finish_checkpoint();
  (void)done_by_all(*communicator_, "load_checkpoint()", [&] {
    rest_for_checkpoint("load_checkpoint()");
    return std::string();
  });
  CheckpointLoader loader(*device_, *communicator_, *host_memory_, parts_.get(), algorithm_name(algorithm_));
  std::optional<LoadedCheckpoint> loaded = loader.open(request);
  if (!loaded) {
    return std::nullopt;
  }
  drop_gradients();
  broken_ = false;
  lost_micro_batches_ = false;
  failed_load_ = loaded->path;
  loader.load(request, *loaded);
  take_attributes(request, loaded->attributes);
  edited_.clear();
  edited_bits_.clear();
  failed_load_.clear();
  return loaded;
}

void EngineCore::take_attributes(const LoadRequest& request, const Attributes& attributes) {
  if (request.module_only) {
    return;
  }
  get(attributes, "counters.global_steps", counters_.global_steps);
  get(attributes, "counters.micro_steps", counters_.micro_steps);
  get(attributes, "counters.skipped_steps", counters_.skipped_steps);
  get(attributes, "counters.global_samples", counters_.global_samples);
  if (!request.optimizer_states || parts_ == nullptr) {
    return;
  }
  std::int64_t most = 0;
  get(attributes, "optimizer.step", most);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    steps_[i] = most;
    const std::string& name = parts_->parameters->name(static_cast<int>(i));
    const auto alias = attributes.find("alias." + name);
    get(attributes, "optimizer.step." + (alias == attributes.end() ? name : alias->second), steps_[i]);
  }
  LossScalerState scaler = scaler_.state();
  get(attributes, "scaler.scale", scaler.scale);
  get(attributes, "scaler.iteration", scaler.iteration);
  get(attributes, "scaler.last_overflow_iteration", scaler.last_overflow_iteration);
  get(attributes, "scaler.hysteresis_left", scaler.hysteresis_left);
  get(attributes, "scaler.skipped_in_a_row", scaler.skipped_in_a_row);
  scaler_.load_state(scaler);
}

bool EngineCore::trains(const std::string& name) const {
  for (int i = 0; parts_ != nullptr && i < parts_->layout->num_parameters(); ++i) {
    if (parts_->parameters->name(i) == name) {
      return true;
    }
  }
  return false;
}

void EngineCore::require_loaded() const {
  if (!failed_load_.empty()) {
    throw ConfigError(
        fmt::format("loading '{}' failed on its way, so the engine holds a mixture of old and new values; load a "
                    "checkpoint that is "
                    "complete",
                    failed_load_));
  }
}

}  // namespace pannier
