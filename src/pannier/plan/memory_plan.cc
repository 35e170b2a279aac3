#include "pannier/plan/memory_plan.h"

#include <fmt/format.h>

#include <numeric>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

std::size_t round_to_page(std::size_t nbytes, std::size_t page) { return (nbytes + page - 1) / page * page; }

bool fits(const MemoryPlan& plan, const MemoryBudget& budget) {
  return (budget.device_nbytes == 0 || plan.device() <= budget.device_nbytes) &&
         (budget.host_nbytes == 0 || plan.host() <= budget.host_nbytes);
}

// Names the change that makes the plan fit, or says that none does.
std::string nearest_fit(const MemoryPlanInput& input, const MemoryBudget& budget) {
  for (const Home home : {Home::kHost, Home::kDevice}) {
    MemoryPlanInput other = input;
    other.optimizer_home = home;
    const MemoryPlan plan = plan_memory(other);
    if (home != input.optimizer_home && fits(plan, budget)) {
      return fmt::format(
          "zero_optimization.offload_optimizer.device \"{}\" would need {} of device and {} of host memory, which fits",
          to_string(home), format_bytes(plan.device()), format_bytes(plan.host()));
    }
  }
  MemoryPlanInput other = input;
  other.optimizer_home = Home::kHost;
  const MemoryPlan smallest = plan_memory(other);
  return fmt::format("the least that can train this model is {} of device and {} of host memory",
                     format_bytes(smallest.device()), format_bytes(smallest.host()));
}

}  // namespace

MemoryPlan plan_memory(const MemoryPlanInput& input) {
  const std::int64_t numel = std::accumulate(input.bucket_numels.begin(), input.bucket_numels.end(), std::int64_t{0});
  const StateShape& shape = input.shape;
  MemoryPlan plan;
  plan.device_parameters = nbytes_of(numel, shape.param_nbytes) + input.unmanaged_nbytes;
  plan.device_optimizer_states = nbytes_of(numel, shape.device_nbytes(input.optimizer_home));
  // Gradients of one micro-batch stay in their own type until their bucket closes; the sum over micro-batches is fp32.
  const bool sum_on_device = input.accumulates && input.optimizer_home == Home::kDevice;
  plan.device_gradients = nbytes_of(input.parameter_numel, shape.param_nbytes + (sum_on_device ? 4U : 0U));
  if (input.optimizer_home == Home::kHost) {
    std::size_t states = 0;
    for (const std::int64_t bucket_numel : input.bucket_numels) {
      states += host_bucket_layout(shape, bucket_numel).nbytes;
    }
    plan.host_optimizer_states = round_to_page(states, input.host_page_nbytes);
    plan.host_gradients =
        round_to_page(nbytes_of(numel, input.accumulates ? 4U : shape.param_nbytes), input.host_page_nbytes);
  }
  return plan;
}

void require_fit(const MemoryPlanInput& input, const MemoryBudget& budget) {
  const MemoryPlan plan = plan_memory(input);
  if (fits(plan, budget)) {
    return;
  }
  const bool device_is_short = budget.device_nbytes != 0 && plan.device() > budget.device_nbytes;
  throw OutOfMemoryError(fmt::format(
      "{} out of memory. The plan needs {} of {} memory before activations ({} parameters, {} gradients, {} optimizer "
      "states), and {} "
      "are allowed; nothing was allocated. Nearest that fits: {}.",
      device_is_short ? "Device" : "Host", format_bytes(device_is_short ? plan.device() : plan.host()),
      device_is_short ? "device" : "host", format_bytes(device_is_short ? plan.device_parameters : 0),
      format_bytes(device_is_short ? plan.device_gradients : plan.host_gradients),
      format_bytes(device_is_short ? plan.device_optimizer_states : plan.host_optimizer_states),
      format_bytes(device_is_short ? budget.device_nbytes : budget.host_nbytes), nearest_fit(input, budget)));
}

std::string format_plan(const MemoryPlan& plan, Home optimizer_home) {
  std::string text = fmt::format("{:<18} {:>12} {:>12}\n", "memory plan", "device", "host");
  const auto line = [&text](const char* owner, std::size_t device, std::size_t host) {
    text += fmt::format("{:<18} {:>12} {:>12}\n", owner, format_bytes(device), format_bytes(host));
  };
  line("parameters", plan.device_parameters, 0);
  line("gradients", plan.device_gradients, plan.host_gradients);
  line("optimizer states", plan.device_optimizer_states, plan.host_optimizer_states);
  line("total", plan.device(), plan.host());
  text += fmt::format("activations: measured after step 1; optimizer states rest on the {}\n",
                      optimizer_home == Home::kDevice ? "device" : "host");
  return text;
}

}  // namespace pannier
