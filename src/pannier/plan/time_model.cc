#include "pannier/plan/time_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// Fine enough that no piece of the piecewise linear cost is stepped over; the refinement then finds its corner.
constexpr int kGridPoints = 1024;
constexpr int kRefinements = 64;
// Seconds below which two bounds are the same.
constexpr double kSame = 1e-6;
// What the busiest resource's load may weigh beside seconds: it only decides among equals.
constexpr double kLoadWeight = 1e-7;

double seconds_of(double amount, double rate) { return rate > 0.0 ? amount / rate : 0.0; }

// A rate that is not known never limits.
double or_endless(double rate) { return rate > 0.0 ? rate : std::numeric_limits<double>::infinity(); }

// What a rate carries in a while; 0 in no time, also at an endless rate.
double carried(double rate, double seconds) { return seconds > 0.0 ? rate * seconds : 0.0; }

void require(bool valid, const char* name, double value) {
  if (!valid) {
    throw ConfigError(fmt::format("{} must be finite and not negative, got {}", name, value));
  }
}

bool is_amount(double value) { return std::isfinite(value) && value >= 0.0; }

// Bytes of one step at one share.
struct Traffic {
  double host_numel = 0.0;
  double streamed_numel = 0.0;
  double kept = 0.0;           // Streamed states that stay on the device.
  double travel = 0.0;         // Streamed states, each way.
  double gradients = 0.0;      // Down, in backward.
  double params = 0.0;         // Up, after the host's update.
  double gathers = 0.0;        // Up, in each forward and each backward.
  double host_dram = 0.0;      // Of the host path after backward.
  double dram_per_byte = 1.0;  // Host memory traffic of one streamed byte.
};

Traffic traffic_of(const SplitInput& input, double streamed_share) {
  const auto numel = static_cast<double>(input.numel);
  Traffic t;
  t.streamed_numel = streamed_share * numel;
  t.host_numel = (1.0 - streamed_share) * numel;
  const double states = input.state_nbytes * t.streamed_numel;
  t.kept = std::min(states, static_cast<double>(input.slack_nbytes));
  t.travel = states - t.kept;
  t.gradients = input.gradient_nbytes * t.host_numel;
  t.params = input.param_nbytes * t.host_numel;
  t.gathers = input.gather_nbytes * numel;
  t.host_dram = std::max(0.0, input.host_dram_nbytes - input.gradient_nbytes) * t.host_numel;
  t.dram_per_byte = input.state_nbytes > 0.0 ? input.streamed_dram_nbytes / (2 * input.state_nbytes) : 1.0;
  return t;
}

// What backward does not finish.
struct LeftOver {
  double up = 0.0;
  double gradients = 0.0;
};

LeftOver after_backward(const Traffic& t, const LinkAndHostRates& rates, double backward_s) {
  const double up = or_endless(rates.up);
  const double up_both = or_endless(rates.up_both > 0.0 ? rates.up_both : rates.up);
  const double down_both = or_endless(rates.down_both > 0.0 ? rates.down_both : rates.down);
  const double both_s = std::min(backward_s, t.gradients / down_both);
  double up_bytes = std::max(0.0, carried(up_both, both_s) + carried(up, backward_s - both_s) - t.gathers);
  if (rates.dram > 0.0 && t.dram_per_byte > 0.0) {
    up_bytes = std::min(up_bytes, std::max(0.0, rates.dram * backward_s - t.gradients) / t.dram_per_byte);
  }
  // An unknown link takes no time, even without a backward to hide it.
  return {.up = rates.up > 0.0 ? std::max(0.0, t.travel - up_bytes) : 0.0,
          .gradients = rates.down > 0.0 ? std::max(0.0, t.gradients - carried(down_both, backward_s)) : 0.0};
}

// The least that each resource leaves exposed, in the order in which one is named when several bind alike.
struct Bounds {
  double link_up = 0.0;
  double link_down = 0.0;
  double dram = 0.0;
  double cores = 0.0;
  double device_update = 0.0;
};

// From the update on, while the host updates the first `host_s`; after that the link is as fast as alone.
double down_seconds(const LinkAndHostRates& rates, double nbytes, double host_s) {
  const double beside = rates.down_beside_update > 0.0 ? rates.down_beside_update : rates.down;
  if (rates.down <= 0.0) {
    return 0.0;
  }
  return nbytes <= beside * host_s ? nbytes / beside : host_s + (nbytes - beside * host_s) / rates.down;
}

// Seconds of the next forward in which streamed states may still come down. A parameter that the host updates is needed
// by its unit, so the last ones are about then: what comes after all units is the loss, where memory peaks.
double seconds_to_peak(const StepObservation& observation) {
  const double forward_s = observation.forward_s.value_or(0.0);
  return std::min(forward_s, observation.to_peak_s.value_or(forward_s));
}

// Predicts one share; says what is needed and bounded, and leaves windows to the caller, who knows what is exposed.
Bounds bounds_of(const SplitInput& input, const Traffic& t, SplitTimes& times) {
  const LinkAndHostRates& rates = input.rates;
  const double to_peak_s = seconds_to_peak(input.observation);
  const double hidden_s = input.overlap_step ? to_peak_s : 0.0;  // Of the host path.
  const LeftOver left = after_backward(t, rates, input.observation.backward_s.value_or(0.0));
  const double up_both = rates.up_both > 0.0 ? rates.up_both : rates.up;
  const double down_both = rates.down_both > 0.0 ? rates.down_both : rates.down;
  const double down_bytes = t.travel + left.gradients;
  const double up_s = seconds_of(left.up + t.params, up_both);
  // While the up link is busy, the down link is slower.
  const double beside_s = up_s + seconds_of(t.gathers, up_both);
  const double slowed_s =
      down_bytes > 0.0 && rates.down > 0.0 ? beside_s * std::max(0.0, 1.0 - down_both / rates.down) : 0.0;
  times.link_up.needed_s = seconds_of(t.travel + t.params, rates.up);
  times.cores.needed_s = seconds_of(t.host_numel * input.update_nbytes / kRatedUpdateNbytes, rates.host_update);
  times.link_down.needed_s = down_seconds(rates, down_bytes, times.cores.needed_s) + slowed_s;
  times.device_update.needed_s = seconds_of(input.update_nbytes * t.streamed_numel, rates.device_copy);
  times.dram.needed_s = seconds_of(t.host_dram + t.dram_per_byte * (left.up + down_bytes), rates.dram);
  Bounds bounds{.link_up = std::max(seconds_of(left.up, up_both), up_s - hidden_s),
                .link_down = times.link_down.needed_s - to_peak_s,
                .dram = times.dram.needed_s - to_peak_s,
                .cores = times.cores.needed_s - hidden_s,
                .device_update = times.device_update.needed_s};
  if (!input.overlap_step && rates.dram > 0.0) {
    // The host path and what comes down beside it share the memory; the forward takes what the link can carry in it.
    const double in_forward =
        carried(std::min(or_endless(rates.down), or_endless(rates.dram / t.dram_per_byte)), to_peak_s);
    const double beside = left.up + std::max(0.0, down_bytes - in_forward);
    bounds.dram = seconds_of(t.host_dram + t.dram_per_byte * beside, rates.dram);
  }
  return bounds;
}

std::string binding_of(const Bounds& bounds, double exposed_s) {
  if (exposed_s <= bounds.device_update + kSame || exposed_s <= kSame) {
    return "nothing";  // What is exposed is the update itself.
  }
  const std::array<std::pair<const char*, double>, 4> named{
      {{"link up", bounds.link_up}, {"link down", bounds.link_down}, {"DRAM", bounds.dram}, {"cores", bounds.cores}}};
  const auto* first =
      std::find_if(named.begin(), named.end(), [&](const auto& bound) { return bound.second >= exposed_s - kSame; });
  return first == named.end() ? "nothing" : first->first;
}

double busiest(const SplitTimes& times) {
  double load = 0.0;
  for (const ResourceTime& time : {times.link_up, times.link_down, times.dram, times.cores}) {
    load = std::max(load, time.window_s > 0.0 ? time.needed_s / time.window_s : 0.0);
  }
  return load;
}

std::int64_t room_numel(const SplitInput& input) {
  const double nbytes = input.state_nbytes + input.gradient_nbytes;
  if (!input.room_nbytes || nbytes <= 0.0) {
    return input.numel;
  }
  const double numel = std::floor(static_cast<double>(*input.room_nbytes) / nbytes);
  return numel < static_cast<double>(input.numel) ? static_cast<std::int64_t>(numel) : input.numel;
}

SplitPlan evaluate(const SplitInput& input, double streamed_share) {
  const Traffic traffic = traffic_of(input, streamed_share);
  SplitPlan plan;
  plan.streamed_share = streamed_share;
  plan.host_share = 1.0 - streamed_share;
  const Bounds bounds = bounds_of(input, traffic, plan.times);
  plan.exposed_s = std::max({0.0, bounds.link_up, bounds.link_down, bounds.dram, bounds.cores, bounds.device_update});
  const double forward_s = input.observation.forward_s.value_or(0.0);
  const double backward_s = input.observation.backward_s.value_or(0.0);
  const double next_s = input.overlap_step ? seconds_to_peak(input.observation) : 0.0;
  plan.times.link_up.window_s = backward_s + plan.exposed_s + next_s;
  plan.times.link_down.window_s = plan.exposed_s + seconds_to_peak(input.observation);
  plan.times.dram.window_s = plan.times.link_down.window_s;
  plan.times.cores.window_s = plan.exposed_s + next_s;
  plan.times.device_update.window_s = plan.exposed_s;
  plan.predicted_step_s = static_cast<double>(input.micro_batches) * (forward_s + backward_s) + plan.exposed_s;
  plan.windows_known = input.observation.forward_s.has_value() && input.observation.backward_s.has_value();
  plan.kept_nbytes = static_cast<std::size_t>(traffic.kept);
  plan.most_streamed_numel = room_numel(input);
  plan.binds = binding_of(bounds, plan.exposed_s);
  return plan;
}

// Walks a grid, then closes in on the corner beside its best point.
SplitPlan least_below(const SplitInput& input, double most_share) {
  const auto cost = [&](const SplitPlan& plan) { return plan.exposed_s + kLoadWeight * busiest(plan.times); };
  const auto better = [&](const SplitPlan& one, const SplitPlan& other) { return cost(one) < cost(other); };
  SplitPlan best = evaluate(input, most_share);
  const double step = most_share / kGridPoints;
  for (int i = 0; i < kGridPoints; ++i) {
    best = std::min(best, evaluate(input, step * i), better);
  }
  double low = std::max(0.0, best.streamed_share - step);
  double high = std::min(most_share, best.streamed_share + step);
  for (int i = 0; i < kRefinements; ++i) {
    const SplitPlan left = evaluate(input, low + (high - low) / 3);
    const SplitPlan right = evaluate(input, high - (high - low) / 3);
    if (better(left, right)) {
      high = right.streamed_share;
    } else {
      low = left.streamed_share;
    }
    best = std::min({best, left, right}, better);
  }
  return best;
}

}  // namespace

void SplitInput::validate() const {
  require(numel >= 0, "numel", static_cast<double>(numel));
  require(micro_batches >= 1, "micro_batches", static_cast<double>(micro_batches));
  for (const auto& [name, value] : {std::pair<const char*, double>{"state_nbytes", state_nbytes},
                                    {"gradient_nbytes", gradient_nbytes},
                                    {"param_nbytes", param_nbytes},
                                    {"host_dram_nbytes", host_dram_nbytes},
                                    {"streamed_dram_nbytes", streamed_dram_nbytes},
                                    {"update_nbytes", update_nbytes},
                                    {"gather_nbytes", gather_nbytes},
                                    {"forward_s", observation.forward_s.value_or(0.0)},
                                    {"backward_s", observation.backward_s.value_or(0.0)},
                                    {"to_peak_s", observation.to_peak_s.value_or(0.0)}}) {
    require(is_amount(value), name, value);
  }
  rates.validate();
}

SplitInput split_input(const StateShape& shape, std::int64_t numel, bool accumulates, bool rests_on_host) {
  const auto param_nbytes = static_cast<double>(shape.param_nbytes);
  SplitInput input{.numel = numel};
  input.state_nbytes = static_cast<double>(shape.device_nbytes(Home::kDevice));
  input.gradient_nbytes = accumulates ? 4.0 : param_nbytes;
  input.param_nbytes = param_nbytes;
  // The parameter is read and written where it is (part of) the master, only written beside an fp32 master.
  const double param_passes = shape.rest_nbytes == 4 ? 1.0 : 2.0;
  input.update_nbytes = 2 * input.state_nbytes + param_passes * param_nbytes + input.gradient_nbytes;
  input.host_dram_nbytes = input.update_nbytes + input.gradient_nbytes + param_nbytes;
  if (rests_on_host) {
    input.state_nbytes += param_nbytes;
    input.param_nbytes = 0.0;
    input.host_dram_nbytes -= param_nbytes;
    input.gather_nbytes = param_nbytes;
  }
  input.streamed_dram_nbytes = 2 * input.state_nbytes;
  return input;
}

SplitPlan evaluate_split(const SplitInput& input, double streamed_share) {
  input.validate();
  if (!(streamed_share >= 0.0 && streamed_share <= 1.0)) {
    throw ConfigError(fmt::format("a share must lie within 0 and 1, got {}", streamed_share));
  }
  return evaluate(input, streamed_share);
}

SplitPlan solve_split(const SplitInput& input) {
  input.validate();
  const std::int64_t most = room_numel(input);
  SplitPlan free = least_below(input, 1.0);
  if (most >= input.numel || free.streamed_share * static_cast<double>(input.numel) <= static_cast<double>(most)) {
    return free;
  }
  SplitPlan limited = least_below(input, static_cast<double>(most) / static_cast<double>(input.numel));
  if (limited.exposed_s > free.exposed_s + kSame) {
    limited.binds = "device memory";
  }
  return limited;
}

StepObservation predict_compute(std::int64_t numel, double tokens, double flops_per_s, bool recompute) {
  if (!(flops_per_s > 0.0 && tokens > 0.0)) {
    return {};
  }
  const double unit_s = static_cast<double>(numel) * tokens / flops_per_s;
  return {.forward_s = 2 * unit_s, .backward_s = (recompute ? 6 : 4) * unit_s};
}

}  // namespace pannier
