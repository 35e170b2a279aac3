// Backward and step. The step reads like the paper: finish the reduction, look at the norm, decide once, update.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <chrono>

#include "pannier/base/error.h"
#include "pannier/base/hash.h"
#include "pannier/base/log.h"
#include "pannier/engine/checkpoint_saver.h"
#include "pannier/engine/engine_core.h"

namespace pannier {
namespace {

// Models look at small values on the device when a forward begins (masks, positions). For so long at most nothing of
// ours is put ahead of them.
constexpr std::chrono::microseconds kMostHold{3000};

}  // namespace

bool EngineCore::is_boundary() const noexcept {
  return boundary_.value_or(!config_.managed_gradient_accumulation || micro_in_window_ + 1 >= batch_.accumulation);
}

std::pair<at::Tensor, at::Tensor> EngineCore::begin_backward(const at::Tensor& loss, bool scale_by_accumulation) {
  require_open();
  require_loaded();
  if (!parts_) {
    throw ConfigError("backward() needs an optimizer; this engine was initialized without one");
  }
  if (loss.numel() != 1 || !loss.requires_grad()) {
    throw ConfigError(
        fmt::format("backward() takes a loss of one element that depends on the parameters, got {} elements{}",
                    loss.numel(), loss.requires_grad() ? "" : " that require no gradient"));
  }
  require_outside_backward("backward()");
  require_no_update();
  check_disk();
  check_save();
  if (parts_->reducer->in_backward()) {
    end_reducer_backward();  // One that the caller ran himself.
  }
  if (!lost_micro_batches_ && !parts_->reducer->backward_failed()) {
    broken_ = false;  // What failed was a window of one micro-batch, which is gone.
  }
  wait_for_parameters();
  parts_->reducer->renew_hooks();
  const bool divide = scale_by_accumulation && batch_.accumulation > 1;
  const at::Tensor reported = divide ? loss / static_cast<double>(batch_.accumulation) : loss;
  const double factor = scaler_.scale();
  const at::Tensor scaled = factor == 1.0 ? reported : reported.to(at::kFloat) * factor;
  open_backward();
  in_own_backward_ = true;
  has_backward_ = true;
  return {reported, scaled};
}

void EngineCore::open_backward(std::int64_t divisor) {
  require_no_update();
  if (parts_->overlap) {
    parts_->overlap->wait_for_updates();  // New gradients go where they read theirs.
  }
  tracer_.begin_backward();
  parts_->exchange->set_step(counters_.global_steps + 1);
  parts_->reducer->begin_backward(is_boundary(), divisor);
  ++backwards_in_window_;
  if (parts_->pilot) {
    parts_->pilot->begin_backward(is_boundary());
  }
  if (route_planner_) {
    route_planner_->mark_backward();
  }
}

void EngineCore::tick_forward(int unit) {
  require_open();
  require_loaded();
  require_whole_step();
  if (unit == 0) {
    check_disk();
    check_save();
  }
  tracer_.tick_forward(unit);
  if (unit == 0 && !knows_units_ && gatherer() != nullptr) {
    gatherer()->begin_forward(0);
  }
  const auto begin = std::chrono::steady_clock::now();
  if (parts_ && parts_->down) {
    unit == 0 ? parts_->down->hold(kMostHold) : parts_->down->go_on();
  }
  if (parts_ && parts_->pilot) {
    parts_->gradients->free_sent(/*wait=*/false);
    parts_->pilot->tick_forward(unit);
  }
  wait_for_unit(unit);
  if (route_planner_ && unit == 0) {
    route_planner_->mark_forward();
  } else if (route_planner_) {
    route_planner_->saw_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
}

void EngineCore::end_backward() {
  require_open();
  try {
    end_reducer_backward();
  } catch (const std::exception& error) {
    abort_backward(error.what());
    throw;
  }
  in_own_backward_ = false;
  tracer_.end_backward();
}

void EngineCore::end_reducer_backward() {
  parts_->reducer->end_backward();
  if (gatherer() != nullptr) {
    gatherer()->finish_backward();
  }
}

void EngineCore::begin_unit_backward(int unit) {
  require_open();
  parts_->reducer->unit_began(gatherer()->begin_backward(unit));
}

void EngineCore::end_unit_backward(int unit) {
  require_open();
  gatherer()->end_backward(unit);
  parts_->reducer->unit_ended(gatherer()->buckets_of(unit));
}

void EngineCore::abort_backward(const std::string& why) {
  require_open();
  lost_micro_batches_ = lost_micro_batches_ || micro_in_window_ > 0;
  in_own_backward_ = false;
  communicator_->report_failure(fmt::format("its backward failed: {}", why));
  drop_gradients();
  broken_ = true;
}

at::Tensor EngineCore::scale(const at::Tensor& loss) {
  auto [reported, scaled] = begin_backward(loss, true);
  in_own_backward_ = false;  // The caller runs it; its end is seen by the next call.
  return scaled;
}

void EngineCore::begin_unannounced_backward(int parameter) {
  if (scaler_.scale() != 1.0) {
    throw UnscaledLossError(
        fmt::format("Loss scaling is required: a gradient of {} came from a backward that was not the engine's, which "
                    "must multiply the loss by the loss scale; call engine.backward(loss) or "
                    "engine.scale(loss).backward(). If this engine is not to train in that backward, freeze its "
                    "parameters with requires_grad_(False)",
                    parts_->parameters->name(parameter)));
  }
  open_backward(batch_.accumulation);
  has_backward_ = true;
}

void EngineCore::require_outside_backward(const char* call) const {
  if (in_own_backward_) {
    throw ConfigError(fmt::format(
        "{} was called inside a backward, from a hook for instance; call it after backward() has returned", call));
  }
}

void EngineCore::refuse_broken_window() {
  drop_gradients();
  broken_ = false;
  lost_micro_batches_ = false;
  has_backward_ = false;
  throw ConfigError(
      "step() after a backward that failed: the gradients of its accumulation window were dropped, nothing was "
      "updated");
}

StepOutcome EngineCore::step(const std::vector<kernels::Hyperparameters>& groups) {
  require_open();
  require_loaded();
  if (!parts_) {
    throw ConfigError("step() needs an optimizer; this engine was initialized without one");
  }
  if (groups.size() != num_groups_) {
    throw ConfigError(fmt::format("step() got {} parameter groups, the engine has {}", groups.size(), num_groups_));
  }
  require_outside_backward("step()");
  if (gatherer() != nullptr && gatherer()->is_held()) {
    throw ConfigError("step() inside pannier.zero.GatheredParameters is not allowed: leave its block first");
  }
  if (!update_ && is_boundary()) {
    share_save_end();
  }
  auto phase = tracer_.phase("step");
  if (!update_) {
    if (const auto ended = end_window(groups)) {
      return *ended;
    }
    begin_update(groups);
  }
  if (parts_->nvme_shards != nullptr || parts_->disk_tide || (overlaps() && parts_->nvme_states)) {
    wait_for_snapshot();  // Its reader does not follow these updates.
  }
  const SnapshotUpdates updates(save_ == nullptr ? nullptr : save_->snapshot());
  const StepOutcome outcome = finish_step();
  phase.end();
  tracer_.end_step(counters_.global_steps);
  return outcome;
}

// What comes before an update. A step that only ends a micro-batch ends here.
std::optional<StepOutcome> EngineCore::end_window(const std::vector<kernels::Hyperparameters>& groups) {
  wait_for_parameters();
  if (parts_->overlap && route_planner_) {
    route_planner_->saw_host_update(parts_->overlap->take_time());
  }
  GradientReducer& reducer = *parts_->reducer;
  if (broken_ || reducer.backward_failed()) {
    refuse_broken_window();
  }
  if (!has_backward_) {
    throw ConfigError("step() before backward(): there is no gradient to apply");
  }
  if (reducer.in_backward()) {
    end_backward();
  }
  try {
    reducer.check_hooks();
  } catch (const ConfigError&) {
    drop_gradients();
    throw;
  }
  has_backward_ = false;
  if (!is_boundary()) {
    ++counters_.micro_steps;
    ++micro_in_window_;
    return StepOutcome::kAccumulating;
  }
  take_edits(true);
  if (gatherer() != nullptr) {
    gatherer()->rest_all();
    take_edits(false);  // Those that came to light when parameters were taken apart.
  }
  if (parts_->pilot) {
    parts_->pilot->tick_update();
  }
  if (route_planner_) {
    route_planner_->mark_update();
  }
  parts_->exchange->set_step(counters_.global_steps + 1);
  finish_window(groups);
  require_all_used();
  return std::nullopt;
}

StepOutcome EngineCore::finish_step() {
  try {
    finish_update();
  } catch (const IoError&) {
    throw;  // What is left to do stays.
  } catch (...) {
    update_.reset();
    throw;
  }
  const Verdict verdict = update_->verdict;
  update_.reset();
  const bool skip = verdict.decision.skip != 0;
  parts_->reducer->drop_window(true);
  if (gatherer() != nullptr) {
    gatherer()->end_window();
  }
  if (route_planner_) {
    route_planner_->end_step();  // A bucket that changes its route must hold no gradient.
  }
  overflow_ = skip;
  micro_in_window_ = 0;
  ++counters_.micro_steps;
  ++counters_.global_steps;
  // Where the caller says when a window ends, it holds as many micro-batches as there were backwards.
  counters_.global_samples +=
      config_.managed_gradient_accumulation ? batch_.train : batch_.train / batch_.accumulation * backwards_in_window_;
  backwards_in_window_ = 0;
  if (skip) {
    skip_step(verdict);
  } else {
    scaler_.update(false, {});
  }
  return skip ? StepOutcome::kSkipped : StepOutcome::kApplied;
}

void EngineCore::skip_step(const Verdict& verdict) {
  ++counters_.skipped_steps;
  const int first = verdict.first_nonfinite_parameter;
  const std::string name = first < 0 ? "a parameter of another rank" : parts_->parameters->name(first);
  log::warning(fmt::format("step {} skipped: {} gradient elements are not finite, first in {}; loss scale {}",
                           counters_.global_steps, verdict.decision.num_nonfinite, name, scaler_.scale()));
  scaler_.update(true, name);
}

// The values of a step's groups may come from what each rank measured itself; with others the ranks' shards would be
// updated by different rules.
void EngineCore::finish_window(const std::vector<kernels::Hyperparameters>& groups) {
  if (communicator_->world_size() == 1) {
    edited_.clear();
    edited_bits_.clear();
    parts_->reducer->finish_window();
    return;
  }
  const std::string text = common_text(groups);
  constexpr int kRoomForTheSum = 20;
  const bool is_same = parts_->reducer->finish_window(static_cast<std::int64_t>(fnv1a(text) >> kRoomForTheSum));
  edited_.clear();
  edited_bits_.clear();
  if (!is_same) {
    drop_gradients();
    communicator_->agree(fmt::format("values of step {}", counters_.global_steps + 1), text);
    throw ConfigError("another rank's parameter groups, step counts or edited parameters differ");
  }
}

void EngineCore::require_all_used() {
  for (std::size_t i = 0; i < steps_.size() && !config_.zero.ignore_unused_parameters; ++i) {
    if (!parts_->reducer->used(static_cast<int>(i))) {
      drop_gradients();
      throw ConfigError(
          fmt::format("parameter {} got no gradient, and zero_optimization.ignore_unused_parameters is false",
                      parts_->parameters->name(static_cast<int>(i))));
    }
  }
}

}  // namespace pannier
