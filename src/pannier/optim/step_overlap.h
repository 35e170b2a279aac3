// Lets step() return while the host still updates: the next forward runs beside it, and waits unit by unit for what it
// is about to read. Nothing is ever stale:
//  1. begin(): the step has decided. The update of each host-routed bucket is prepared down to addresses, its
//     parameters are released (reading one throws), and the HostUpdater's thread begins, with the bucket that the next
//     forward needs first. A bucket with parameters that something else refers to (p.detach(), a state dict) could be
//     read half-written, so it is updated before begin() returns.
//     States on a disk are lent a chunk at a time, by the HostUpdater's thread; until is_idle() nobody else uses them.
//  2. tick(unit): the model is about to run a unit. The host waits until its buckets are on their way, the device until
//     they have arrived, and their parameters come back.
//     Parameters that are partitioned (stage 3) are at rest, and released by whoever gathers them; who sends one of
//     them to the device calls wait_for() before.
//  3. wait_for_all(): the same for everything; before a backward, whose gradients go where the updates read theirs, and
//     before anybody looks at parameters or states.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pannier/optim/host_updater.h"
#include "pannier/optim/update_pipeline.h"
#include "pannier/tier/released_parameters.h"

namespace pannier {

/// What the overlap works on. Everything must outlive it.
struct StepOverlapParts {
  Device& device;
  const BucketLayout& layout;
  ParameterBuckets& parameters;
  const ParameterResidence& residence;
  UpdatePipeline& pipeline;
  const UpdateRoutes& routes;
  Mover& up;
};

/// Runs one engine's host updates beside its next forward. Of the engine's thread alone.
class StepOverlap {
 public:
  StepOverlap(StepOverlapParts parts, const HostUpdaterOptions& options);

  /// Which parameters each unit of the model reads; unit 0 is the model's forward itself. Without it everything is
  /// waited for at the first tick.
  void set_units(const std::vector<std::vector<int>>& parameters_of);

  /// Begins the updates of all host-routed buckets; none may be under way. Throws before anything was begun.
  void begin(const UpdatePipeline::Coefficients& coefficients, float grad_factor);
  /// Waits for those that must be over before step() returns. Throws IoError, and may be called again then.
  void finish_begin();
  /// The model is about to run `unit`. Throws ConfigError for a parameter whose data was replaced while it was
  /// released.
  void tick(int unit);
  /// The bucket's update is over, and its parameters are in place for what the calling thread does next. Throws as
  /// tick(), and what the update threw.
  void wait_for(int bucket);
  /// Everything is in place for what the calling thread does next. Throws as tick(), and what an update threw; its
  /// parameters then stay released.
  void wait_for_all();
  /// The host waits until no update runs. Parameters are not given back, so any thread may call it.
  void wait_for_updates();
  /// Whether no update is under way, so that the calling thread may use the states.
  [[nodiscard]] bool is_idle() const;
  /// How fast the thread updated since the last call.
  [[nodiscard]] HostUpdateTime take_time() { return updater_.take_time(); }
  /// Puts everything in place and ends the thread; says what could not be.
  void close() noexcept;

 private:
  /// When the model needs a bucket: 0 with its forward, then by the first unit of the last window that did.
  [[nodiscard]] std::vector<int> first_uses() const;
  void note_alias(int parameter);
  [[nodiscard]] bool is_lent_later(int bucket) const;
  [[nodiscard]] std::vector<BucketUpdate> prepared(const std::vector<int>& buckets,
                                                   const UpdatePipeline::Coefficients& coefficients);

  StepOverlapParts parts_;
  ReleasedParameters released_;
  HostUpdater updater_;
  std::vector<std::vector<int>> buckets_of_;  ///< By unit.
  std::vector<int> order_;                    ///< By unit: the place of its first tick in this window; -1: none yet.
  int num_ticked_ = 0;
  std::vector<int> first_use_;              ///< By bucket, of the updates that run or ran last.
  std::vector<bool> is_under_way_;          ///< By bucket: its update runs, or has not been waited for.
  std::vector<std::optional<Lease>> lent_;  ///< By bucket: its state meanwhile, where all of it is lent at once.
  std::vector<int> at_once_;                ///< Buckets that finish_begin() waits for.
  bool noted_alias_ = false;
};

}  // namespace pannier
