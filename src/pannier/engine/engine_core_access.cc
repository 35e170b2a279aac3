// Looking at and changing what an engine holds: states, gradients, and edits that torch does not count.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <iterator>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/engine/engine_core.h"
#include "pannier/tier/fingerprint.h"

namespace pannier {

void EngineCore::set_units(const std::vector<std::vector<std::int64_t>>& parameters_of) {
  require_open();
  std::vector<std::vector<int>> units;
  for (const auto& parameters : parameters_of) {
    units.push_back(managed(parameters));
    std::erase_if(units.back(), [this](int parameter) { return parameter >= static_cast<int>(steps_.size()); });
  }
  if (overlaps()) {
    parts_->overlap->set_units(units);
  }
}

// Those of them that are in buckets, as the parts number them.
std::vector<int> EngineCore::managed(const std::vector<std::int64_t>& parameters) const {
  std::vector<int> result;
  for (const std::int64_t parameter : parameters) {
    if (const int index = managed_of_.at(static_cast<std::size_t>(parameter)); index >= 0) {
      result.push_back(index);
    }
  }
  return result;
}

void EngineCore::use(std::int64_t parameter) {
  for (const int index : managed({parameter})) {
    gatherer()->use(index);
    parts_->reducer->unit_began({parts_->model_layout->bucket_of(index)});  // Its end will not be seen.
  }
}

void EngineCore::hold(const std::vector<std::int64_t>& parameters, bool watches) {
  require_open();
  wait_for_snapshot();
  wait_for_parameters();
  const std::vector<int> indices = managed(parameters);
  if (gatherer() != nullptr) {
    gatherer()->hold(indices);
  }
  if (watches && parts_) {
    const std::vector<std::int64_t> bits = bits_of(indices);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      watched_bits_.emplace(indices[i], bits[i]);  // What an outer hold has seen stays.
    }
  }
}

void EngineCore::let_go(const std::vector<std::int64_t>& parameters, std::optional<int> modifier) {
  require_open();
  if (parts_ == nullptr) {
    return;
  }
  wait_for_snapshot();
  const std::vector<int> indices = managed(parameters);
  const auto let_go = [&] {
    if (gatherer() != nullptr) {
      gatherer()->let_go(indices);
    }
  };
  try {
    const std::map<int, std::int64_t> changed = take_watched_edits(indices);
    if (modifier) {
      share_edits(indices, changed, *modifier);
    } else {
      note_partitioned_edits(indices);
    }
  } catch (...) {
    let_go();
    throw;
  }
  let_go();
}

std::vector<std::int64_t> EngineCore::bits_of(const std::vector<int>& parameters) {
  std::vector<at::Tensor> flat;
  flat.reserve(parameters.size());
  for (const int parameter : parameters) {
    const Segment& segment = parts_->model_layout->segment_of(parameter);
    flat.push_back(parts_->parameters->bucket(parts_->model_layout->bucket_of(parameter))
                       .narrow(0, segment.offset, segment.numel));
  }
  return fingerprints(flat);
}

// Of parameters that will be partitioned again, what a rank wrote can only be seen now.
void EngineCore::note_partitioned_edits(const std::vector<int>& parameters) {
  if (gatherer() == nullptr || communicator_->world_size() == 1) {
    return;
  }
  const c10::NoGradGuard no_grad;
  take_edits(true);
  std::vector<int> edited;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(edited),
               [this](int parameter) { return edited_.contains(parameter); });
  const std::vector<std::int64_t> bits = bits_of(edited);
  for (std::size_t i = 0; i < edited.size(); ++i) {
    edited_bits_[edited[i]] = bits[i];
  }
}

// Those that were held and are not as they were, with the bits that they have now.
std::map<int, std::int64_t> EngineCore::take_watched_edits(const std::vector<int>& parameters) {
  std::vector<int> watched;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(watched),
               [this](int parameter) { return watched_bits_.contains(parameter); });
  if (watched.empty()) {
    return {};
  }
  const c10::NoGradGuard no_grad;
  take_edits(true);
  const std::vector<std::int64_t> bits = bits_of(watched);
  std::map<int, std::int64_t> changed;
  std::vector<int> indices;
  for (std::size_t i = 0; i < watched.size(); ++i) {
    const auto before = watched_bits_.extract(watched[i]);
    if (before.mapped() != bits[i]) {
      changed.emplace(watched[i], bits[i]);
      indices.push_back(watched[i]);
    }
  }
  edited_.insert(indices.begin(), indices.end());
  keep_edits(indices);
  return changed;
}

// Values of the modifier go to the others; masters of what it left alone are not rounded to what the parameter shows.
// Others may have written the same.
void EngineCore::share_edits(const std::vector<int>& parameters, const std::map<int, std::int64_t>& changed,
                             int modifier) {
  const c10::NoGradGuard no_grad;
  const bool is_modifier = communicator_->rank() == modifier;
  // Of each parameter, whether the modifier changed it, and to which bits.
  std::vector<std::int64_t> numbers(2 * parameters.size());
  for (std::size_t i = 0; i < parameters.size() && is_modifier; ++i) {
    if (const auto found = changed.find(parameters[i]); found != changed.end()) {
      numbers[2 * i] = 1;
      numbers[2 * i + 1] = found->second;
    }
  }
  communicator_->sum(numbers);
  std::int64_t num_others = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (const auto found = changed.find(parameters[i]); found != changed.end()) {
      num_others += numbers[2 * i] == 0 || numbers[2 * i + 1] != found->second ? 1 : 0;
    }
  }
  communicator_->sum({&num_others, 1});
  std::vector<int> shared;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (numbers[2 * i] > 0 || num_others > 0) {
      shared.push_back(parameters[i]);
    }
  }
  for (const int parameter : shared) {
    const at::Tensor flat = parts_->parameters->bucket(parts_->model_layout->bucket_of(parameter));
    const Segment& segment = parts_->model_layout->segment_of(parameter);
    communicator_->broadcast(flat.narrow(0, segment.offset, segment.numel), modifier);
    edited_.insert(parameter);
    edited_bits_.erase(parameter);
  }
  keep_edits(shared);
  if (num_others > 0) {
    throw ConfigError(
        fmt::format("parameters were changed otherwise inside GatheredParameters on a rank that is not its "
                    "modifier_rank {}; all ranks have "
                    "that rank's values now",
                    modifier));
  }
}

void EngineCore::wait_for_unit(int unit) {
  require_open();
  if (overlaps()) {
    parts_->overlap->tick(unit);
  }
}

void EngineCore::wait_for_parameters() {
  if (overlaps()) {
    parts_->overlap->wait_for_all();
  }
}

void EngineCore::take_edits(bool take_replaced) {
  std::vector<int> edited = parts_->parameters->take_edits(take_replaced);
  const std::vector<int> at_rest = parts_->residence->take_edited();
  edited.insert(edited.end(), at_rest.begin(), at_rest.end());
  edited_.insert(edited.begin(), edited.end());
  keep_edits(edited);
}

// Values that somebody wrote rest, and become the master weights of what is trained.
void EngineCore::keep_edits(const std::vector<int>& parameters) {
  std::vector<int> trained;
  for (const int parameter : parameters) {
    if (parameter < static_cast<int>(steps_.size())) {
      trained.push_back(parameter);
    } else {
      parts_->residence->keep(parts_->model_layout->bucket_of(parameter));
    }
  }
  parts_->pipeline->take_edits(trained);
}

at::Tensor EngineCore::state(int parameter, const std::string& name) {
  const int index = managed_index(parameter);
  require_whole_step();
  wait_for_parameters();
  take_edits(false);
  return parts_->pipeline->read(index, name);
}

void EngineCore::set_state(int parameter, const std::string& name, const at::Tensor& value) {
  const int index = managed_index(parameter);
  require_whole_step();
  wait_for_parameters();
  take_edits(false);
  require_same(value, fmt::format("{} of {}", name, parts_->parameters->name(index)));
  wait_for_snapshot();
  parts_->pipeline->write(index, name, value);
}

std::vector<std::string> EngineCore::state_names() const {
  require_open();
  return parts_ ? parts_->pipeline->state_names() : std::vector<std::string>{};
}

std::int64_t& EngineCore::parameter_step(int parameter) {
  return steps_[static_cast<std::size_t>(managed_index(parameter))];
}

std::optional<at::Tensor> EngineCore::gradient(int parameter) {
  const c10::NoGradGuard no_grad;
  const int index = managed_index(parameter);
  wait_for_parameters();
  if (parts_->reducer->in_backward()) {
    end_reducer_backward();
  }
  const ShardPiece& piece = parts_->shards->piece_of(index);
  const bool is_used = parts_->reducer->used(index);
  const std::optional<at::Tensor> sum = parts_->reducer->piece(index);
  // On how many ranks it was used, and on how many the piece has not come.
  std::array<std::int64_t, 2> ranks{is_used, !sum && piece.numel > 0};
  communicator_->sum(ranks);
  if (ranks[0] == 0 || ranks[1] > 0) {
    return std::nullopt;
  }
  const at::Tensor whole =
      at::empty({parts_->layout->segment_of(index).numel},
                parts_->parameters->parameter(index).options().dtype(at::kFloat).requires_grad(false));
  if (piece.numel > 0) {
    whole.narrow(0, piece.parameter_offset, piece.numel).copy_(*sum);
  }
  parts_->exchange->gather_parameter(whole, index, ShardExchange::kGradient);
  return parts_->parameters->view_like_parameter(whole.div_(gradient_scale()), index).clone();
}

void EngineCore::set_gradient(int parameter, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const int index = managed_index(parameter);
  if (!gradient(parameter)) {
    throw ConfigError(fmt::format("parameter {} has no gradient to replace; set it between backward() and step()",
                                  parts_->parameters->name(index)));
  }
  const at::Tensor& owner = parts_->parameters->parameter(index);
  if (value.sizes() != owner.sizes()) {
    throw ConfigError(fmt::format("the gradient of parameter {} has shape {}, got {}", parts_->parameters->name(index),
                                  owner.sizes().vec(), value.sizes().vec()));
  }
  require_same(value, fmt::format("the gradient of {}", parts_->parameters->name(index)));
  const ShardPiece& piece = parts_->shards->piece_of(index);
  const at::Tensor flat = at::empty({owner.numel()}, owner.options().dtype(at::kFloat).requires_grad(false));
  parts_->parameters->view_like_parameter(flat, index).copy_(value.to(at::kFloat) * gradient_scale());
  parts_->reducer->replace(index, flat.narrow(0, piece.parameter_offset, piece.numel));
}

void EngineCore::synchronize() {
  require_open();
  wait_for_parameters();
  require_whole_step();
  if (parts_ && parts_->tide) {
    parts_->tide->settle();
  }
  for (NvmeStateStore* const store : disk_stores()) {
    store->settle();
  }
}

void EngineCore::parameters_changed() {
  require_open();
  require_whole_step();
  wait_for_parameters();
  wait_for_snapshot();
  if (parts_) {
    take_edits(true);
    std::vector<int> all;  // What is partitioned now can't have been written.
    for (int i = 0; i < parts_->parameters->num_parameters(); ++i) {
      if (parts_->parameters->has_memory(parts_->model_layout->bucket_of(i))) {
        all.push_back(i);
      }
    }
    keep_edits(all);
  }
}

void EngineCore::drop_gradients() {
  require_open();
  require_outside_backward("drop_gradients()");
  require_whole_step();
  update_.reset();  // One that an error ended before it changed anything.
  if (parts_) {
    parts_->reducer->drop_window(false);
  }
  micro_in_window_ = 0;
  backwards_in_window_ = 0;
  has_backward_ = false;
}

}  // namespace pannier
