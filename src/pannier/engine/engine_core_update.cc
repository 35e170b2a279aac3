// The update of a step: begun once the gradients are shared, finished by the same call of step(), or by a later one
// where a disk's error came in between.
#include <exception>

#include "pannier/base/error.h"
#include "pannier/engine/engine_core.h"

namespace pannier {

// What the device updates is issued before the host knows the decision, so that the device never waits for the host.
void EngineCore::begin_update(const std::vector<kernels::Hyperparameters>& groups) {
  parts_->judge->decide({gradient_scale(), config_.gradient_clipping, config_.check_grad_overflow});
  UpdatePipeline::Coefficients coefficients(steps_.size());
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (parts_->reducer->used(static_cast<int>(i))) {
      const auto& group = groups[static_cast<std::size_t>(group_of_[i])];
      coefficients[i] = kernels::make_coefficients(algorithm_, group, steps_[i] + 1, 1.0F);
    }
  }
  update_ = std::make_unique<Update>(*parts_->pipeline, std::move(coefficients), parts_->judge->control());
  if (parts_->disk_stores().empty()) {  // Whose errors can only be told when the decision is known.
    parts_->pipeline->issue(update_->on_device, /*wait=*/false);
  }
  auto phase = tracer_.phase("wait for the decision");
  update_->verdict = parts_->judge->verdict();
  phase.end();
  grad_norm_ = update_->verdict.decision.norm;
  if (update_->verdict.decision.skip == 0 && !parts_->overlap) {
    update_->on_host = parts_->pipeline->host_updates(update_->coefficients);
  }
}

// May be called again where a disk's error ended it.
void EngineCore::finish_update() {
  const bool skip = update_->verdict.decision.skip != 0;
  std::exception_ptr failed;
  try {
    if (!skip) {
      update_on_host(*update_);
    }
    if (!skip || parts_->disk_tide == nullptr) {
      parts_->pipeline->issue(update_->on_device, /*wait=*/true);
    }
    if (!skip) {
      finish_host_updates();
    }
    if (parts_->nvme_shards != nullptr && communicator_->world_size() > 1) {
      parts_->nvme_shards->disk().settle();  // An error told in the next forward would end the group of ranks.
    }
  } catch (const IoError&) {
    failed = std::current_exception();
  }
  if (parts_->disk_tide) {
    parts_->disk_tide->settle();
  }
  share_disk_failure(failed);
  if (!skip) {
    parts_->pipeline->publish(update_->coefficients);
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      steps_[i] += update_->coefficients[i] ? 1 : 0;
    }
  }
  if (parts_->pilot) {
    parts_->pilot->end_step();
  }
}

void EngineCore::update_on_host(Update& update) {
  const float grad_factor = update.verdict.decision.grad_factor;
  if (parts_->overlap) {
    if (!update.is_overlapped) {
      parts_->overlap->begin(update.coefficients, grad_factor);
      update.is_overlapped = true;
    }
    parts_->overlap->finish_begin();
    return;
  }
  if (route_planner_) {
    route_planner_->begin_host_update();
  }
  const std::int64_t numel = parts_->pipeline->update_on_host(update.on_host, update.on_device, grad_factor);
  if (route_planner_) {
    route_planner_->end_host_update(numel);
  }
}

void EngineCore::finish_host_updates() {
  // Other ranks are given what was updated here before step() returns.
  const bool is_clean = route_planner_ && route_planner_->wants_clean_step();
  if (parts_->overlap && (communicator_->world_size() > 1 || is_clean)) {
    parts_->overlap->wait_for_all();
  }
}

}  // namespace pannier
