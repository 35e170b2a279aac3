#include "pannier/engine/route_planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/device/compute.h"
#include "pannier/optim/update_rate.h"

namespace pannier {
namespace {

// A new split must promise this much of a step to be worth the change.
constexpr double kLeastGain = 0.004;
// Until then the rates as they are in training may still be settling.
constexpr std::int64_t kSettledSteps = 16;
// A forward that waited for more than this part of its time says nothing about the model.
constexpr double kMostWait = 0.02;
// The least time seen counts; it rises slowly, for batches that grow.
constexpr double kRise = 1.02;

// A way down that was busy for less of the update says nothing about the two together.
constexpr double kLeastBusy = 0.5;

// Of the probe of host memory: caches grow with cores.
constexpr std::size_t kCopyNbytesPerThread = std::size_t{32} << 20;

void keep_least(std::optional<double>& value, double seen) { value = value ? std::min(kRise * *value, seen) : seen; }

}  // namespace

RoutePlanner::RoutePlanner(RoutePlannerParts parts, MeasuredRates rates)
    : parts_(std::move(parts)), origin_(rates.origin) {
  parts_.input.rates = rates.rates;
  parts_.pilot.on_peak([this] {
    if (!peak_ && forward_) {
      peak_ = parts_.device.record_time(Queue::kCompute);
      waited_to_peak_s_ = waited_s_;
    }
  });
}

double RoutePlanner::streamed_share() const {
  std::int64_t streamed = 0;
  for (std::size_t b = 0; b < bucket_numels().size(); ++b) {
    streamed += routes()[b] == UpdateRoute::kStreamed ? bucket_numels()[b] : 0;
  }
  return static_cast<double>(streamed) / static_cast<double>(std::max<std::int64_t>(1, parts_.input.numel));
}

void RoutePlanner::begin_host_update() {
  host_update_begin_ = std::chrono::steady_clock::now();
  down_before_ = parts_.down.work_done();
}

void RoutePlanner::end_host_update(std::int64_t numel) {
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - host_update_begin_;
  saw_host_update({numel, time.count(), work_since(down_before_, parts_.down)});
}

void RoutePlanner::saw_host_update(const HostUpdateTime& seen) {
  if (seen.numel == 0) {
    return;
  }
  ObservedRates observed;
  const double numel = static_cast<double>(seen.numel) * parts_.input.update_nbytes / kRatedUpdateNbytes;
  observed.host_update = {numel, seen.seconds};
  if (seen.down.busy_s > kLeastBusy * seen.seconds) {
    if (parts_.input.rates.down_beside_update == 0) {
      parts_.input.rates.host_update = 0;  // That was seen, or probed, without transfers beside it.
    }
    observed.down_beside_update = {seen.down.nbytes, seen.down.busy_s};
  }
  parts_.input.rates = correct(parts_.input.rates, observed);
}

void RoutePlanner::observe() {
  if (forward_ && backward_ && update_) {
    const double forward = parts_.device.seconds_between(forward_, backward_);
    if (waited_s_ < kMostWait * forward) {
      keep_least(parts_.input.observation.forward_s, forward);
    }
    keep_least(parts_.input.observation.backward_s, parts_.device.seconds_between(backward_, update_));
    if (peak_) {
      const double to_peak = parts_.device.seconds_between(forward_, peak_);
      if (waited_to_peak_s_ < kMostWait * to_peak) {
        keep_least(parts_.input.observation.to_peak_s, to_peak);
      }
    }
  }
  forward_ = peak_ = backward_ = update_ = nullptr;
}

void RoutePlanner::end_step() {
  observe();
  if (++num_steps_ >= next_solve_ && parts_.input.observation.forward_s) {
    next_solve_ = num_steps_ < kSettledSteps ? num_steps_ + 2 : 2 * num_steps_;
    solve();
  }
}

void RoutePlanner::solve() {
  const double share = streamed_share();
  parts_.input.slack_nbytes = parts_.pilot.slack_nbytes();
  // The gradients of streamed parameters are on the device too; the model of time counts them itself.
  parts_.input.room_nbytes =
      parts_.pilot.room_nbytes() +
      static_cast<std::size_t>(share * static_cast<double>(parts_.input.numel) * parts_.input.gradient_nbytes);
  const SplitPlan best = solve_split(parts_.input);
  const SplitPlan present = evaluate_split(parts_.input, share);
  if (num_steps_ > 2 && present.predicted_step_s - best.predicted_step_s < kLeastGain * best.predicted_step_s) {
    split_ = present;
    return;
  }
  split_ = best;
  const auto chosen = assign_routes(
      bucket_numels(), {.device = 0.0, .host = best.host_share, .most_streamed_numel = best.most_streamed_numel});
  for (std::size_t b = 0; b < chosen.size(); ++b) {
    parts_.pipeline.set_route(static_cast<int>(b), chosen[b]);
  }
  log::info(fmt::format(
      "update split after {} steps: {:.0f} % streamed, {:.0f} % on the host; {:.3f} s a step expected, of which "
      "{:.3f} s hidden by nothing; {} binds (forward {:.3f} s, backward {:.3f} s, {} free at the peak, {} at the "
      "update)",
      num_steps_, 100 * best.streamed_share, 100 * best.host_share, best.predicted_step_s, best.exposed_s, best.binds,
      *parts_.input.observation.forward_s, parts_.input.observation.backward_s.value_or(0.0),
      format_bytes(parts_.input.slack_nbytes), format_bytes(*parts_.input.room_nbytes)));
}

MeasuredRates machine_rates(Device& device) {
  RateProbes probes;
  probes.parallel_for = torch_parallel_for(host_threads());
  probes.copy_nbytes = std::max(probes.copy_nbytes, kCopyNbytesPerThread * static_cast<std::size_t>(host_threads()));
  probes.host_update = [](double most_seconds) {
    return measure_update_rate(torch_parallel_for(host_threads()), {.most_seconds = most_seconds});
  };
  probes.links = [&device](double most_seconds) { return device.measure_links(most_seconds); };
  MachineIdentity machine = identify_machine({device.name()});
  machine.num_cores = host_threads();  // Ranks that share a machine have each their own rates.
  return cached_rates(rates_cache_folder(), machine, probes);
}

}  // namespace pannier
