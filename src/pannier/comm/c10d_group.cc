#include "pannier/comm/c10d_group.h"

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/comm/c10d_parts.h"
#include "pannier/comm/group_communicator.h"

namespace pannier {
namespace {

bool has_backend(c10d::ProcessGroup& group, c10::DeviceType device, const std::string& name) {
  for (const c10::Device& type : group.getDeviceTypes()) {
    if (type.type() == device && group.getBackend(device)->getBackendName() == name) {
      return true;
    }
  }
  return false;
}

// Each rank of a host has its own GPU, which torch's current device is by then.
at::Device current_gpu() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice(); }

}  // namespace

// The one list that outlives everything on purpose: what is in it may still be written to when the process ends.
void keep_until_exit(std::shared_ptr<void> buffers) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(buffers));
}

std::unique_ptr<Communicator> make_c10d_communicator(ProcessGroupPtr group, const GroupOptions& options) {
  options.validate();
  if (group->getStore() == nullptr) {
    throw ConfigError("the process group has no store, through which ranks tell each other what goes wrong");
  }
  const bool has_gloo = has_backend(*group, c10::DeviceType::CPU, "gloo");
  const bool has_nccl = has_backend(*group, c10::DeviceType::CUDA, "nccl");
  if (!has_gloo && !has_nccl) {
    throw ConfigError("the process group has neither Gloo for CPUs nor NCCL for GPUs");
  }
  try {
    group->setTimeout(options.collective_timeout * 2 +
                      std::chrono::minutes(10));  // Ours comes first, and names a rank.
  } catch (const c10::Error&) {
    // torch's debugging wrapper does not pass it on; then the timeout that the group was made with stays.
  }
  const auto nccl = has_nccl ? make_nccl_transport(group) : nullptr;
  GroupParts parts;
  parts.rank = group->getRank();
  parts.world_size = group->getSize();
  parts.state = std::make_shared<GroupState>();
  parts.store = make_c10d_store(group->getStore());
  parts.collective_timeout = options.collective_timeout;
  parts.monitor =
      std::make_shared<Monitor>(parts.store->clone(), parts.state, parts.rank, parts.world_size, options.monitor);
  parts.host = has_gloo ? make_gloo_transport(group, parts.state, parts.monitor) : nullptr;
  if (nccl) {
    parts.monitor->also_poll([nccl, monitor = std::weak_ptr(parts.monitor), timeout = options.collective_timeout] {
      if (const auto strong = monitor.lock()) {
        poll(*nccl, *strong, timeout);
      }
    });
    parts.device = as_transport(nccl);
    parts.staging_device = current_gpu();
  }
  return std::make_unique<GroupCommunicator>(std::move(parts));
}

}  // namespace pannier
