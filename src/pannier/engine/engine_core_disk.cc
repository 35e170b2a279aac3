// What a disk's errors mean for a step. Before its first update one leaves everything as it was. After that a step
// can't be undone, since what was updated is on its way to the disk already; so it is finished instead: the gradients,
// the decision and what was not updated yet are kept, and step(), called again, goes on there.
#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/engine/engine_core.h"

namespace pannier {

void EngineCore::require_whole_step() const {
  if (update_ && (update_->on_host.num_done > 0 || update_->on_device.has_begun || update_->is_overlapped ||
                  communicator_->world_size() > 1)) {
    throw ConfigError(
        "the last step is half done: an error of the disk under nvme_path interrupted it. Call step() again, which "
        "finishes it, or load a checkpoint into a new engine");
  }
}

void EngineCore::require_no_update() const {
  require_whole_step();
  if (update_) {
    throw ConfigError(
        "backward() after a step() that an error of the disk ended before it changed anything: call step() again, or "
        "drop its gradients with engine.drop_gradients()");
  }
}

// Write-backs that failed after step() had returned. Among ranks they are told in the next step, by all together. While
// updates run beside the forward, whoever waits for them is told of what fails.
void EngineCore::check_disk() {
  if (communicator_->world_size() > 1 || (overlaps() && !parts_->overlap->is_idle())) {
    return;
  }
  for (NvmeStateStore* const store : disk_stores()) {
    store->check();
  }
}

std::vector<NvmeStateStore*> EngineCore::disk_stores() const {
  return parts_ ? parts_->disk_stores() : std::vector<NvmeStateStore*>{};
}

NvmeUse EngineCore::nvme() const {
  NvmeUse use;
  if (parts_ && parts_->nvme_states) {
    use.states = parts_->nvme_states->stats();
  }
  if (parts_ && parts_->nvme_shards != nullptr) {
    use.parameters = parts_->nvme_shards->disk().stats();
  }
  return use;
}

// One rank's disk fails, and the others would wait for it in the next collective: all throw what the first that failed
// says.
void EngineCore::share_disk_failure(std::exception_ptr error) {
  if (disk_stores().empty() || communicator_->world_size() == 1) {
    if (error) {
      std::rethrow_exception(error);
    }
    return;
  }
  std::vector<std::int64_t> failed(static_cast<std::size_t>(communicator_->world_size()));
  std::string text;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const IoError& caught) {
      failed[static_cast<std::size_t>(communicator_->rank())] = std::max(caught.error_number(), 1);
      text = caught.what();
    }
  }
  communicator_->sum(failed);
  const auto first = std::find_if(failed.begin(), failed.end(), [](std::int64_t number) { return number != 0; });
  if (first != failed.end()) {
    const auto rank = static_cast<std::size_t>(first - failed.begin());
    const auto texts = communicator_->share_texts("errors of disks", text);
    throw IoError(fmt::format("rank {}: {}", rank, texts.at(rank)), static_cast<int>(*first));
  }
}

}  // namespace pannier
