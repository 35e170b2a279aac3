// Checkpoints of C++ programs: what the engine adds to the core's.
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <charconv>
#include <unordered_set>

#include "pannier/base/error.h"
#include "pannier/engine/engine.h"

namespace pannier {
namespace {

constexpr const char* kSchedule = "schedule.iteration";
constexpr const char* kClient = "client.";

std::optional<double> number_in(const std::map<std::string, std::string>& attributes, const std::string& key) {
  const auto found = attributes.find(key);
  double value = 0;
  if (found == attributes.end() ||
      std::from_chars(found->second.data(), found->second.data() + found->second.size(), value).ec != std::errc()) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

std::vector<NamedTensor> Engine::frozen() const {
  std::vector<NamedTensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module_->named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second && !core_.trains(item.key())) {
      result.push_back({item.key(), item.value().detach()});
    }
  }
  return result;
}

std::vector<NamedTensor> Engine::buffers() const {
  std::vector<NamedTensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module_->named_buffers()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.push_back({item.key(), item.value()});
    }
  }
  return result;
}

std::string Engine::save_checkpoint(const std::string& folder, const std::string& tag,
                                    const std::map<std::string, std::string>& client_state, bool save_latest) {
  CheckpointContents contents;
  contents.groups = hyper_;
  contents.frozen = frozen();
  contents.buffers = buffers();
  for (const auto& [key, value] : client_state) {
    contents.attributes[kClient + key] = value;
  }
  if (schedule_) {
    contents.attributes[kSchedule] = fmt::format("{}", schedule_->last_iteration());
  }
  return core_.save_checkpoint({folder, tag, save_latest}, contents);
}

std::optional<LoadedCheckpoint> Engine::load_checkpoint(LoadRequest request) {
  request.frozen = frozen();
  request.buffers = buffers();
  request.num_groups = hyper_.size();
  auto loaded = core_.load_checkpoint(request);
  if (!loaded) {
    return std::nullopt;
  }
  const auto attributes = std::exchange(loaded->attributes, {});
  for (const auto& [key, value] : attributes) {
    if (key.starts_with(kClient)) {
      loaded->attributes[key.substr(std::string_view(kClient).size())] = value;
    }
  }
  if (request.module_only) {
    return loaded;
  }
  for (std::size_t g = 0; g < hyper_.size() && request.optimizer_states; ++g) {
    const auto take = [&](const char* key, double& value) {
      value = number_in(attributes, fmt::format("group.{}.{}", g, key)).value_or(value);
    };
    take("lr", hyper_[g].lr);
    take("beta1", hyper_[g].beta1);
    take("beta2", hyper_[g].beta2);
    take("eps", hyper_[g].eps);
    take("weight_decay", hyper_[g].weight_decay);
    take("momentum", hyper_[g].momentum);
  }
  if (const auto iteration = number_in(attributes, kSchedule); schedule_ && iteration) {
    schedule_->step_to(static_cast<std::int64_t>(*iteration));
    use_schedule();
  }
  return loaded;
}

}  // namespace pannier
