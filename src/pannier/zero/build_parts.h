// Chooses and builds the parts of an engine, once: which reducer and gatherer a stage wants, which store and update
// path a home wants. No other file tests the stage or the home.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pannier/comm/communicator.h"
#include "pannier/comm/shard_exchange.h"
#include "pannier/device/device.h"
#include "pannier/layout/shard_layout.h"
#include "pannier/optim/step_overlap.h"
#include "pannier/optim/tide_pilot.h"
#include "pannier/optim/update_pipeline.h"
#include "pannier/plan/memory_plan.h"
#include "pannier/tier/disk_tide.h"
#include "pannier/tier/nvme_shards.h"
#include "pannier/tier/nvme_state_store.h"
#include "pannier/zero/gradient_reducer.h"
#include "pannier/zero/parameter_gatherer.h"

namespace pannier {

/// Stage 3 alone: how parameters are partitioned.
struct ShardingOptions {
  Home parameter_home = Home::kDevice;  ///< Where shards rest.
  NvmeStateOptions nvme;                ///< With the home kNvme.
  /// The parameters that each unit of the model reads while it runs; unit 0 is the forward itself. A parameter in none
  /// belongs to unit 0.
  std::vector<std::vector<int>> units;
  std::int64_t prefetch_numel = 50'000'000;  ///< Elements gathered ahead of use.
  std::int64_t persistence_numel = 100'000;  ///< Parameters of at most so many elements stay whole.
  /// Of the last parameters, which are frozen: the types that they become, equal ones side by side. They are
  /// partitioned as the others, and have no gradient and no state.
  std::vector<at::ScalarType> frozen_dtypes;
  int node_size = 0;  ///< Consecutive ranks that keep a copy of the parameters among them; 0: all ranks are one node.
};

/// What decides the parts.
struct PartsOptions {
  int stage = 0;  ///< 0 to 3.
  Home optimizer_home = Home::kDevice;
  NvmeStateOptions nvme;  ///< With the home kNvme.
  /// What may be used of host memory; what is left of it holds states that would rest on a disk. Empty: none do.
  std::optional<std::size_t> host_budget;
  at::ScalarType dtype = at::kFloat;  ///< Of parameters and gradients.
  kernels::Algorithm algorithm = kernels::Algorithm::kAdamW;
  double momentum = 0.0;         ///< SGD: the greatest of any group; 0 needs no momentum buffer.
  double initial_state1 = 0.0;   ///< Adagrad's initial accumulator value.
  bool accumulates = false;      ///< More than one micro-batch a step.
  bool sum_in_own_type = false;  ///< 16-bit sums, on request.
  BucketOptions buckets;
  /// Of host-resident states: the share of elements whose buckets are updated on the device (streamed), 0 to 1.
  double streamed_share = 0.0;
  std::optional<std::size_t> device_budget;  ///< What the device may hold in all; empty: what the model itself takes.
  MoverOptions movers;
  bool overlap_step = false;  ///< Host updates run beside the next forward.
  int update_threads = 0;     ///< Of the host's update; 0: all that need not be left to transfers.
  ShardingOptions sharding;
};

/// The parts, in order of dependence. Those that a home does not need are null.
struct Parts {
  Parts() = default;
  Parts(Parts&&) = default;
  Parts& operator=(Parts&&) = delete;
  /// Ends the threads before the memory that they work on goes.
  ~Parts();
  /// What rests on disks.
  [[nodiscard]] std::vector<NvmeStateStore*> disk_stores() const;

  std::unique_ptr<Mover> up;
  std::unique_ptr<Mover> down;
  std::unique_ptr<BucketLayout> layout;  ///< Of parameters that are trained,
  std::unique_ptr<ShardLayout> shards;
  std::unique_ptr<BucketLayout> model_layout;  ///< and of frozen ones after them.
  std::unique_ptr<ShardLayout> model_shards;
  std::unique_ptr<ShardExchange> exchange;
  std::unique_ptr<ParameterBuckets> parameters;
  std::unique_ptr<ParameterShards> parameter_shards;  ///< Null where all parameters are whole.
  std::unique_ptr<ShardGathering> gathering;          ///< Null where all parameters are whole.
  std::unique_ptr<ParameterResidence> residence;
  NvmeShards* nvme_shards = nullptr;      ///< The shards, where they rest on a disk; else null.
  ParameterGatherer* gatherer = nullptr;  ///< The residence, where parameters are partitioned; else null.
  std::unique_ptr<StateStore> device_states;
  std::unique_ptr<HostStateStore> host_states;
  std::unique_ptr<NvmeStateStore> nvme_states;
  std::unique_ptr<DiskTide> disk_tide;  ///< Null where no state comes from a disk to be updated on the device.
  std::unique_ptr<Tide> tide;
  std::unique_ptr<GradientStore> device_gradients;
  std::unique_ptr<HostGradients> host_gradients;
  std::unique_ptr<GradientStore> gradients;  ///< Of all buckets.
  std::unique_ptr<UpdatePath> device_path;
  std::unique_ptr<UpdatePath> host_path;
  std::unique_ptr<UpdateRoutes> routes;
  std::unique_ptr<GradientJudge> judge;
  std::unique_ptr<TidePilot> pilot;
  std::vector<std::unique_ptr<Registration>> registrations;
  std::unique_ptr<UpdatePipeline> pipeline;
  std::unique_ptr<GradientReducer> reducer;
  std::unique_ptr<StepOverlap> overlap;
};

/// What the parts will hold on one rank, without building them. `unmanaged_nbytes`: of what is in no bucket.
[[nodiscard]] MemoryPlanInput plan_input(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                                         std::size_t unmanaged_nbytes, int rank, int world_size);

/// Builds the parts for these parameters and moves them into their buckets, with the values that rank 0 gives. Where a
/// parameter's share is defined, its values are those of all ranks' shares, one after the other.
/// `device`, `memory` and `communicator` must outlive the parts. Throws ConfigError, OutOfMemoryError, CollectiveError
/// or torch's out-of-memory error.
[[nodiscard]] Parts build_parts(const PartsOptions& options, Device& device, HostMemory& memory,
                                Communicator& communicator, std::vector<at::Tensor> parameters,
                                std::vector<std::string> names, std::vector<at::Tensor> shares = {});

}  // namespace pannier
