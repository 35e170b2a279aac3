#include "pannier/plan/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/plan/nearest_fit.h"

namespace pannier {
namespace {

std::size_t round_to_page(std::size_t nbytes, std::size_t page) { return (nbytes + page - 1) / page * page; }

bool is_partitioned(const MemoryPlanInput& input, std::size_t bucket) {
  return !input.is_partitioned.empty() && input.is_partitioned[bucket];
}

// What rests of the parameters where, and what is whole at the same time.
void plan_parameters(const MemoryPlanInput& input, MemoryPlan& plan) {
  std::int64_t on_device = 0;
  std::int64_t on_host = 0;
  for (std::size_t i = 0; i < input.bucket_numels.size(); ++i) {
    if (!is_partitioned(input, i)) {
      on_device += input.bucket_numels[i];
    } else {
      const std::int64_t own = input.parameter_home == Home::kNvme ? 0 : shards_of(input)[i];  // The node's are not.
      (input.parameter_home == Home::kDevice ? on_device : on_host) +=
          own + (input.node_numels.empty() ? 0 : input.node_numels[i]);
    }
  }
  const bool rests_on_device = input.parameter_home == Home::kDevice;
  const std::size_t frozen =
      input.frozen.node_nbytes + (input.parameter_home == Home::kNvme ? 0 : input.frozen.own_nbytes);
  plan.device_parameters = nbytes_of(on_device, input.shape.param_nbytes) + input.gathered_nbytes +
                           input.unmanaged_nbytes + input.frozen.whole_nbytes + (rests_on_device ? frozen : 0);
  const DiskShare& disk = input.nvme_parameters;
  plan.host_parameters =
      round_to_page(nbytes_of(on_host, input.shape.param_nbytes) + (rests_on_device ? 0 : frozen) + disk.host_nbytes,
                    input.host_page_nbytes);
  plan.host_staging = round_to_page(disk.staging_nbytes, input.host_page_nbytes);
  plan.nvme_parameters = disk.file_nbytes;
}

}  // namespace

MemoryPlan plan_memory(const MemoryPlanInput& input) {
  PANNIER_CHECK(input.routes.empty() || input.routes.size() == input.bucket_numels.size(),
                fmt::format("{} routes for {} buckets", input.routes.size(), input.bucket_numels.size()));
  const StateShape& shape = input.shape;
  std::int64_t numel = 0;
  std::int64_t on_device = 0;
  std::size_t host_states = 0;
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < input.bucket_numels.size(); ++i) {
    const std::int64_t bucket_numel = shards_of(input)[i];
    numel += bucket_numel;
    largest = std::max(largest, input.bucket_numels[i]);
    const bool rests_on_device =
        input.routes.empty() ? input.optimizer_home == Home::kDevice : input.routes[i] == UpdateRoute::kDevice;
    if (rests_on_device) {
      on_device += bucket_numel;
    } else {
      StateShape held = shape;
      held.param_nbytes = is_partitioned(input, i) && input.parameter_home == Home::kHost ? 0 : shape.param_nbytes;
      host_states += host_bucket_layout(held, bucket_numel).nbytes;
    }
  }
  MemoryPlan plan;
  plan_parameters(input, plan);
  plan.device_optimizer_states = nbytes_of(on_device, shape.device_nbytes(Home::kDevice));
  // Gradients of one micro-batch stay in their own type until their bucket closes; the sum over micro-batches is fp32.
  const bool alone = input.world_size == 1;
  const std::int64_t summed = alone && on_device == numel ? input.parameter_numel : on_device;  // Without padding.
  plan.device_gradients =
      nbytes_of(input.parameter_numel, shape.param_nbytes) + (input.accumulates || !alone ? nbytes_of(summed, 4) : 0);
  if (!alone) {
    // Two buckets are under way, each packed here and as the others' parts of this rank's shard.
    plan.device_gradients += 4 * nbytes_of(largest, input.sums_on_each_rank ? 4 : shape.param_nbytes) +
                             (input.sums_on_each_rank ? nbytes_of(input.parameter_numel, 4) : 0);
  }
  plan.device_activations = input.activations_nbytes;
  plan.host_checkpoint = round_to_page(input.checkpoint_nbytes, input.host_page_nbytes);
  if (on_device < numel) {
    const bool on_disk = input.optimizer_home == Home::kNvme;
    const DiskShare disk = on_disk ? input.nvme_states : DiskShare{};
    plan.host_optimizer_states = round_to_page(on_disk ? disk.host_nbytes : host_states, input.host_page_nbytes);
    plan.host_staging += round_to_page(disk.staging_nbytes, input.host_page_nbytes);
    plan.nvme_optimizer_states = disk.file_nbytes;
    plan.host_gradients = round_to_page(
        nbytes_of(numel - on_device, input.accumulates || !alone ? 4U : shape.param_nbytes), input.host_page_nbytes);
  }
  return plan;
}

bool fits(const MemoryPlan& plan, const MemoryBudget& budget) noexcept {
  return (budget.device_nbytes == 0 || plan.device() <= budget.device_nbytes) &&
         (budget.host_nbytes == 0 || plan.host() <= budget.host_nbytes);
}

void require_fit(const MemoryPlanInput& input, const MemoryBudget& budget) {
  const MemoryPlan plan = plan_memory(input);
  if (fits(plan, budget)) {
    return;
  }
  const bool device_is_short = budget.device_nbytes != 0 && plan.device() > budget.device_nbytes;
  const std::string activations = device_is_short && plan.device_activations > 0
                                      ? fmt::format(", {} activations", format_bytes(plan.device_activations))
                                      : "";
  throw OutOfMemoryError(fmt::format(
      "{} out of memory. The plan needs {} of {} memory{} ({} parameters, {} gradients, {} optimizer states{}), and {} "
      "are allowed; nothing was allocated. Nearest that fits: {}.",
      device_is_short ? "Device" : "Host", format_bytes(device_is_short ? plan.device() : plan.host()),
      device_is_short ? "device" : "host", plan.device_activations > 0 ? "" : " before activations",
      format_bytes(device_is_short ? plan.device_parameters : 0),
      format_bytes(device_is_short ? plan.device_gradients : plan.host_gradients),
      format_bytes(device_is_short ? plan.device_optimizer_states : plan.host_optimizer_states + plan.host_staging),
      activations, format_bytes(device_is_short ? budget.device_nbytes : budget.host_nbytes),
      describe(find_nearest_fit(input, budget))));
}

std::string format_plan(const MemoryPlan& plan, Home optimizer_home, std::optional<std::size_t> activations_nbytes) {
  std::string text = fmt::format("{:<18} {:>12} {:>12}\n", "memory plan", "device", "host");
  const auto line = [&text](const char* owner, std::size_t device, std::size_t host) {
    text += fmt::format("{:<18} {:>12} {:>12}\n", owner, format_bytes(device), format_bytes(host));
  };
  line("parameters", plan.device_parameters, plan.host_parameters);
  line("gradients", plan.device_gradients, plan.host_gradients);
  line("optimizer states", plan.device_optimizer_states, plan.host_optimizer_states);
  if (plan.host_staging > 0) {
    line("nvme staging", 0, plan.host_staging);
  }
  if (plan.host_checkpoint > 0) {
    line("checkpoint", 0, plan.host_checkpoint);
  }
  if (plan.device_activations > 0) {
    line("activations", plan.device_activations, 0);
  }
  line("total", plan.device(), plan.host());
  const std::string activations = activations_nbytes
                                      ? fmt::format("peak {}, measured", format_bytes(*activations_nbytes))
                                  : plan.device_activations > 0 ? "as given"
                                                                : "measured after step 1";
  const bool on_both = plan.device_optimizer_states > 0 && plan.host_optimizer_states > 0;
  const std::string on_disk = fmt::format("disk ({})", format_bytes(plan.nvme_optimizer_states));
  const bool in_memory_too = plan.host_optimizer_states > 0;
  text += fmt::format("activations: {}; optimizer states rest on the {}\n", activations,
                      optimizer_home == Home::kNvme     ? on_disk + (in_memory_too ? " and the host" : "")
                      : on_both                         ? "device and the host"
                      : optimizer_home == Home::kDevice ? "device"
                                                        : "host");
  if (plan.nvme_parameters > 0) {
    text += fmt::format("parameters rest on the disk ({}){}\n", format_bytes(plan.nvme_parameters),
                        plan.host_parameters > 0 ? " and the host" : "");
  }
  return text;
}

}  // namespace pannier
