#include "pannier/plan/nearest_fit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "pannier/base/units.h"

namespace pannier {
namespace {

struct Change {
  bool home = false;
  bool micro_batch = false;
  bool single = false;  // One micro-batch a step.
};

// Homes and smaller micro-batches keep the numbers of a step; a single micro-batch is another batch, so it comes last.
constexpr std::array<Change, 7> kChanges{{{.home = true},
                                          {.micro_batch = true},
                                          {.home = true, .micro_batch = true},
                                          {.single = true},
                                          {.home = true, .single = true},
                                          {.micro_batch = true, .single = true},
                                          {.home = true, .micro_batch = true, .single = true}}};

std::size_t scaled(std::size_t nbytes, std::int64_t part, std::int64_t whole) {
  return static_cast<std::size_t>(
      std::ceil(static_cast<double>(nbytes) * static_cast<double>(part) / static_cast<double>(whole)));
}

bool may_shrink(const MemoryPlanInput& input) { return input.micro_batch_size > 1 && input.activations_nbytes > 0; }

void shrink_micro_batch(MemoryPlanInput& input, std::int64_t size) {
  input.activations_nbytes = scaled(input.activations_nbytes, size, input.micro_batch_size);
  input.micro_batch_size = size;
}

// The greatest micro-batch that leaves the device within its budget; 1 where none does.
std::int64_t micro_batch_within(const MemoryPlanInput& input, const MemoryBudget& budget) {
  const std::size_t fixed = plan_memory(input).device() - input.activations_nbytes;
  if (budget.device_nbytes == 0) {
    return input.micro_batch_size - 1;
  }
  const std::size_t room = budget.device_nbytes > fixed ? budget.device_nbytes - fixed : 0;
  const double samples = static_cast<double>(room) / static_cast<double>(input.activations_nbytes) *
                         static_cast<double>(input.micro_batch_size);
  return static_cast<std::int64_t>(std::clamp(samples, 1.0, static_cast<double>(input.micro_batch_size - 1)));
}

// Applies a change; false when there is nothing to change. A single micro-batch that is also made smaller is a smaller
// batch, where there was a single one before too.
bool apply(const Change& change, const MemoryBudget& budget, NearestFit& nearest) {
  MemoryPlanInput& input = nearest.input;
  if ((change.single && !change.micro_batch && !input.accumulates) || (change.micro_batch && !may_shrink(input))) {
    return false;
  }
  if (change.home) {
    input.optimizer_home = input.optimizer_home == Home::kDevice ? Home::kHost : Home::kDevice;
    input.routes.clear();
    nearest.changes.push_back(
        fmt::format("zero_optimization.offload_optimizer.device \"{}\"", to_string(input.optimizer_home)));
  }
  if (change.single) {
    input.accumulates = false;
    nearest.changes.emplace_back("gradient_accumulation_steps 1");
  }
  if (change.micro_batch) {
    input.accumulates = !change.single;  // More micro-batches make the same batch.
    shrink_micro_batch(input, micro_batch_within(input, budget));
    nearest.changes.push_back(fmt::format("train_micro_batch_size_per_gpu {}", input.micro_batch_size));
  }
  return true;
}

}  // namespace

NearestFit find_nearest_fit(const MemoryPlanInput& input, const MemoryBudget& budget) {
  if (fits(plan_memory(input), budget)) {
    return {.input = input, .changes = {}, .fits = true};
  }
  for (const Change& change : kChanges) {
    NearestFit nearest{.input = input, .changes = {}, .fits = true};
    if (apply(change, budget, nearest) && fits(plan_memory(nearest.input), budget)) {
      return nearest;
    }
  }
  NearestFit least{.input = input, .changes = {}, .fits = false};
  least.input.optimizer_home = Home::kHost;
  least.input.routes.clear();
  least.input.accumulates = false;
  if (may_shrink(input)) {
    shrink_micro_batch(least.input, 1);
  }
  return least;
}

std::string describe(const NearestFit& nearest) {
  const MemoryPlan plan = plan_memory(nearest.input);
  const std::string device = format_bytes(plan.device());
  const std::string host = format_bytes(plan.host());
  if (!nearest.fits) {
    return fmt::format("the least that can train this model is {} of device and {} of host memory", device, host);
  }
  return fmt::format("{} would need {} of device and {} of host memory, which fits",
                     nearest.changes.empty() ? "this plan" : fmt::format("{}", fmt::join(nearest.changes, " and ")),
                     device, host);
}

}  // namespace pannier
