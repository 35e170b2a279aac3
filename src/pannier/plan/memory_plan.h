// What training will hold, predicted before anything is allocated: a pure function of numbers. Exact to the byte for
// what Pannier itself allocates; activations belong to the model and are known only after the first step, or given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pannier/layout/bucket_layout.h"
#include "pannier/layout/state_shape.h"
#include "pannier/plan/update_route.h"

namespace pannier {

/// What something takes whose home is a disk.
struct DiskShare {
  std::size_t file_nbytes = 0;     ///< On the disk,
  std::size_t staging_nbytes = 0;  ///< in the memory between the disk and its user,
  std::size_t host_nbytes = 0;     ///< and of what stays in host memory.
};

/// What frozen parameters in buckets of their own take on one rank. They have no gradients and no states.
struct FrozenShare {
  std::size_t whole_nbytes = 0;  ///< Small ones, whole on the device.
  std::size_t own_nbytes = 0;    ///< This rank's shards of others, where parameters rest,
  std::size_t node_nbytes = 0;   ///< and what it keeps of them for its node.
};

/// What the plan is computed from.
struct MemoryPlanInput {
  std::vector<std::int64_t> bucket_numels;  ///< Elements of each bucket, padding included.
  /// The same of this rank's shards; empty: there is one rank, and they are the buckets.
  std::vector<std::int64_t> shard_numels{};
  std::vector<std::int64_t> node_numels{};  ///< And what a rank keeps of each for its node; empty: nothing.
  int world_size = 1;
  bool sums_on_each_rank = false;    ///< Stage 1 with accumulation: fp32 sums of all parameters before they are shared.
  std::int64_t parameter_numel = 0;  ///< Elements of all parameters, without padding.
  /// Stage 3: whether only a shard of a bucket's parameters rests, by bucket; empty: all are whole.
  std::vector<bool> is_partitioned{};
  Home parameter_home = Home::kDevice;  ///< Of those shards.
  std::size_t gathered_nbytes = 0;      ///< Of what is whole at the same time.
  FrozenShare frozen{};                 ///< Of frozen parameters, which the lists above leave out.
  StateShape shape;
  Home optimizer_home = Home::kDevice;
  DiskShare nvme_states{};              ///< With the home kNvme.
  DiskShare nvme_parameters{};          ///< The same of the parameters.
  std::size_t checkpoint_nbytes = 0;    ///< Through which a checkpoint is written while training goes on.
  bool accumulates = false;             ///< Gradients of several micro-batches add up in fp32.
  std::size_t unmanaged_nbytes = 0;     ///< Buffers of the model, and frozen parameters that are in no bucket.
  std::size_t host_page_nbytes = 4096;  ///< Host slabs are rounded up to it.
  /// A route for each bucket; empty: all by `optimizer_home`. Streamed and host take the same memory, so that a bucket
  /// may change from one to the other as the split is solved again.
  std::vector<UpdateRoute> routes{};
  std::size_t activations_nbytes = 0;  ///< Peak of one micro-batch, where it is known.
  std::int64_t micro_batch_size = 0;   ///< Samples of it; 0 where not known.
};

/// Predicted bytes at the peak of each owner.
struct MemoryPlan {
  std::size_t device_parameters = 0;  ///< Buckets, frozen parameters and buffers.
  std::size_t device_gradients = 0;
  std::size_t device_optimizer_states = 0;
  std::size_t device_activations = 0;     ///< 0 where they are not known.
  std::size_t host_parameters = 0;        ///< Shards that rest there.
  std::size_t host_optimizer_states = 0;  ///< With the host's copy of other parameters.
  std::size_t host_staging = 0;           ///< Between disks and who uses what rests there.
  std::size_t host_gradients = 0;
  std::size_t nvme_parameters = 0;
  std::size_t host_checkpoint = 0;  ///< Between states and the checkpoint that they are written to.
  std::size_t nvme_optimizer_states = 0;

  [[nodiscard]] std::size_t device() const noexcept {
    return device_parameters + device_gradients + device_optimizer_states + device_activations;
  }
  [[nodiscard]] std::size_t host() const noexcept {
    return host_parameters + host_optimizer_states + host_staging + host_gradients + host_checkpoint;
  }
  [[nodiscard]] std::size_t nvme() const noexcept { return nvme_parameters + nvme_optimizer_states; }
};

/// Elements of this rank's shards, one a bucket.
[[nodiscard]] inline const std::vector<std::int64_t>& shards_of(const MemoryPlanInput& input) noexcept {
  return input.shard_numels.empty() ? input.bucket_numels : input.shard_numels;
}

/// Predicts the memory of one rank.
[[nodiscard]] MemoryPlan plan_memory(const MemoryPlanInput& input);

/// What the user allows; 0 means no limit was given.
struct MemoryBudget {
  std::size_t device_nbytes = 0;
  std::size_t host_nbytes = 0;
};

/// Whether the plan stays within what was given.
[[nodiscard]] bool fits(const MemoryPlan& plan, const MemoryBudget& budget) noexcept;

/// Throws OutOfMemoryError where the plan exceeds a budget, saying by how much and the nearest plan that fits
/// (nearest_fit.h). Activations that are not known are not counted, so a plan that passes may still meet the cap in a
/// step.
void require_fit(const MemoryPlanInput& input, const MemoryBudget& budget);

/// The plan as a table for people, a line an owner and tier. `activations_nbytes`: their measured peak, after a step.
[[nodiscard]] std::string format_plan(const MemoryPlan& plan, Home optimizer_home,
                                      std::optional<std::size_t> activations_nbytes = std::nullopt);

}  // namespace pannier
