// Solves the split between streamed and host updates while training goes on: the machine's rates from the probe, the
// times of forward and backward as the device saw them, and the room that the pilot found, give the share with the
// shortest step; buckets then change their route between two steps. No route changes a bit of the weights.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pannier/device/compute.h"
#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/optim/host_updater.h"
#include "pannier/optim/tide_pilot.h"
#include "pannier/optim/update_pipeline.h"
#include "pannier/plan/rate_correction.h"
#include "pannier/plan/time_model.h"

namespace pannier {

/// What a route planner works with. Everything must outlive it.
struct RoutePlannerParts {
  Device& device;
  std::vector<std::int64_t> bucket_numels;  ///< In backward order.
  UpdateRoutes& routes;
  UpdatePipeline& pipeline;
  TidePilot& pilot;
  Mover& down;
  SplitInput input;  ///< All but observation, rates, slack and room.
};

/// Times the steps and sets the routes. One thread.
class RoutePlanner {
 public:
  RoutePlanner(RoutePlannerParts parts, MeasuredRates rates);
  ~RoutePlanner() { parts_.pilot.on_peak(nullptr); }
  RoutePlanner(const RoutePlanner&) = delete;
  RoutePlanner& operator=(const RoutePlanner&) = delete;

  /// Moments of a micro-batch, in the order of the caller's stream.
  void mark_forward() {
    forward_ = parts_.device.record_time(Queue::kCompute);
    peak_ = nullptr;
    waited_s_ = 0;
  }
  void mark_backward() { backward_ = parts_.device.record_time(Queue::kCompute); }
  void mark_update() { update_ = parts_.device.record_time(Queue::kCompute); }
  /// The host waited for transfers or updates in the forward that is under way, so that it says little about the model.
  void saw_wait(double seconds) noexcept { waited_s_ += seconds; }
  /// Whether a forward without waits is still to be seen: steps should not overlap until then.
  [[nodiscard]] bool wants_clean_step() const noexcept { return num_steps_ < kCleanSteps; }
  /// The host's update begins on the calling thread.
  void begin_host_update();
  /// It has ended, after `numel` parameters.
  void end_host_update(std::int64_t numel);
  /// The host has updated in a thread of its own.
  void saw_host_update(const HostUpdateTime& seen);
  /// A step has ended, and the device is past its gradients. After a few steps, and then ever more rarely, solves the
  /// split anew.
  void end_step();

  [[nodiscard]] const SplitPlan& split() const noexcept { return split_; }
  [[nodiscard]] const StepObservation& observation() const noexcept { return parts_.input.observation; }
  [[nodiscard]] const LinkAndHostRates& rates() const noexcept { return parts_.input.rates; }
  [[nodiscard]] const std::vector<UpdateRoute>& routes() const noexcept { return parts_.routes.routes(); }
  [[nodiscard]] const std::vector<std::int64_t>& bucket_numels() const noexcept { return parts_.bucket_numels; }
  /// Of the elements, as the routes are now.
  [[nodiscard]] double streamed_share() const;
  [[nodiscard]] std::size_t slack_nbytes() const { return parts_.pilot.slack_nbytes(); }
  [[nodiscard]] std::size_t room_nbytes() const { return parts_.pilot.room_nbytes(); }
  [[nodiscard]] RateOrigin origin() const noexcept { return origin_; }

 private:
  void observe();
  void solve();

  static constexpr std::int64_t kCleanSteps = 3;  ///< The first is slow; two are seen.

  RoutePlannerParts parts_;
  RateOrigin origin_;
  SplitPlan split_;
  EventPtr forward_, peak_, backward_, update_;
  std::chrono::steady_clock::time_point host_update_begin_;
  MoverWork down_before_;
  double waited_to_peak_s_ = 0;
  std::int64_t num_steps_ = 0;
  std::int64_t next_solve_ = kCleanSteps;
  double waited_s_ = 0;  ///< In this forward.
};

/// This machine's rates with this device, measured or from the cache.
[[nodiscard]] MeasuredRates machine_rates(Device& device);

}  // namespace pannier
