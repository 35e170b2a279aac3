#include "pannier/zero/build_parts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/device/dtype.h"

namespace pannier {
namespace {

std::vector<std::int64_t> bucket_numels(const BucketLayout& layout) {
  std::vector<std::int64_t> numels;
  for (const auto& bucket : layout.buckets()) {
    numels.push_back(bucket.numel);
  }
  return numels;
}

StateShape shape_of(const PartsOptions& options) {
  const auto names = kernels::state_names(options.algorithm, options.momentum);
  return state_shape_of(state_format_of(options.dtype), static_cast<int>(names.size()));
}

std::vector<UpdateRoute> choose_routes(const PartsOptions& options, const ShardLayout& shards) {
  if (options.optimizer_home == Home::kDevice) {
    return std::vector<UpdateRoute>(static_cast<std::size_t>(shards.buckets().num_buckets()), UpdateRoute::kDevice);
  }
  return assign_routes(shards.numels(), {.host = 1.0 - options.streamed_share});
}

// This rank's part of a bucket's parameters.
std::function<at::Tensor(int)> own_parameters(const Parts& parts) {
  return [buckets = parts.parameters.get(), shards = parts.shards.get()](int bucket) {
    const Shard& shard = shards->shard(bucket);
    return buckets->bucket(bucket).narrow(0, shard.begin, shard.numel());
  };
}

// Alone a gradient rests in its own type; among ranks what rests is the sum over them, in fp32.
GradientStoreOptions store_options(const PartsOptions& options, int world_size) {
  if (world_size == 1) {
    return {grad_type_of(options.dtype), options.accumulates, options.sum_in_own_type};
  }
  return {kernels::GradType::kFp32, options.accumulates, false};
}

// A mover that gets a core late leaves the link idle, so the update leaves each one, and one to the caller's thread
// where that runs the next forward meanwhile. Without a device's queues nothing moves beside the update.
int update_threads(const PartsOptions& options, const Device& device) {
  if (options.update_threads > 0 || device.torch_device().is_cpu()) {
    return options.update_threads;
  }
  const int all = torch_num_threads();
  const int others = options.overlap_step ? 3 : 2;
  return std::max(1, all - std::min(others, all / 4));
}

// Memory that can't be registered still works; transfers then wait for the host, and the user should know why.
void register_host(Device& device, std::span<std::byte> memory, const char* what, Parts& parts) {
  std::string reason;
  if (auto registration = device.register_host(memory, reason)) {
    parts.registrations.push_back(std::move(registration));
  } else if (!reason.empty()) {
    log::warning(fmt::format("host memory of {} could not be registered with {}: {}; transfers will be slower", what,
                             device.name(), reason));
  }
}

void build_host_home(const PartsOptions& options, Device& device, HostMemory& memory, Parts& parts) {
  const StateShape shape = shape_of(options);
  parts.up = std::make_unique<Mover>(device, Queue::kUp, options.movers);
  parts.down = std::make_unique<Mover>(device, Queue::kDown, options.movers);
  parts.host_states = std::make_unique<HostStateStore>(memory, shape, parts.shards->numels());
  register_host(device, parts.host_states->bytes(), "optimizer states", parts);
  parts.host_gradients = std::make_unique<HostGradients>(
      device, memory, *parts.shards, store_options(options, parts.shards->world_size()), *parts.down);
  register_host(device, parts.host_gradients->bytes(), "gradients", parts);
  parts.tide = std::make_unique<Tide>(TideParts{device, *parts.host_states, *parts.up, *parts.down, shape,
                                                parts.shards->numels(), own_parameters(parts)});
  parts.host_path = make_host_path(device, own_parameters(parts), *parts.up, update_threads(options, device));
  parts.gradients = make_routed_gradients(
      *parts.device_gradients, *parts.host_gradients, *parts.layout,
      [routes = parts.routes.get()](int bucket) { return routes->route(bucket) == UpdateRoute::kHost; });
}

void build_home(const PartsOptions& options, Device& device, HostMemory& memory, Parts& parts) {
  PANNIER_CHECK(options.optimizer_home != Home::kNvme, "a home without a store was asked for");
  const int num_buckets = parts.layout->num_buckets();
  parts.device_gradients =
      make_device_gradients(device, parts.layout->num_parameters(), store_options(options, parts.shards->world_size()));
  parts.device_path = make_device_path(device);
  UpdateRoutes::Way on_device{nullptr, parts.device_path.get()};
  // The table is built first, since the gradients ask it; what it points to follows.
  const auto chosen = choose_routes(options, *parts.shards);
  if (options.optimizer_home == Home::kDevice) {
    parts.device_states = make_device_store(device, shape_of(options), num_buckets, own_parameters(parts));
    on_device.states = parts.device_states.get();
    parts.routes = std::make_unique<UpdateRoutes>(chosen, on_device, UpdateRoutes::Way{}, UpdateRoutes::Way{});
    parts.gradients = std::move(parts.device_gradients);
    return;
  }
  parts.routes = std::make_unique<UpdateRoutes>(chosen, on_device, UpdateRoutes::Way{}, UpdateRoutes::Way{});
  build_host_home(options, device, memory, parts);
  *parts.routes = UpdateRoutes(chosen, on_device, {parts.tide.get(), parts.device_path.get()},
                               {parts.host_states.get(), parts.host_path.get()});
}

// Alone there is nothing to partition, so the stages differ in nothing.
std::function<std::unique_ptr<GradientSharing>(GradientSharing::Deliver)> sharing_of(const PartsOptions& options,
                                                                                     Device& device,
                                                                                     const Parts& parts) {
  if (parts.shards->world_size() == 1) {
    return make_solo_sharing;
  }
  const bool sums_first = options.stage <= 1;
  const SharingParts sharing{device, *parts.shards, *parts.exchange, options.dtype};
  return [sharing, sums_first](GradientSharing::Deliver deliver) {
    return make_rank_sharing(sharing, sums_first, std::move(deliver));
  };
}

}  // namespace

MemoryPlanInput plan_input(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                           std::size_t unmanaged_nbytes, int rank, int world_size) {
  const BucketLayout layout(numels, options.buckets);
  return {.bucket_numels = bucket_numels(layout),
          .shard_numels = ShardLayout(layout, rank, world_size).numels(),
          .world_size = world_size,
          .sums_on_each_rank = world_size > 1 && options.stage <= 1 && options.accumulates,
          .parameter_numel = std::accumulate(numels.begin(), numels.end(), std::int64_t{0}),
          .shape = shape_of(options),
          .optimizer_home = options.optimizer_home,
          .accumulates = options.accumulates && !options.sum_in_own_type,
          .unmanaged_nbytes = unmanaged_nbytes,
          .host_page_nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE))};
}

Parts::~Parts() {
  if (overlap) {
    overlap->close();
  }
  for (Mover* mover : {up.get(), down.get()}) {
    if (mover != nullptr) {
      mover->close();
    }
  }
}

Parts build_parts(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                  std::vector<at::Tensor> parameters, std::vector<std::string> names) {
  PANNIER_CHECK(0 <= options.stage && options.stage <= 3, fmt::format("stage {}", options.stage));
  std::vector<std::int64_t> numels;
  for (const auto& parameter : parameters) {
    numels.push_back(parameter.numel());
  }
  Parts parts;
  parts.layout = std::make_unique<BucketLayout>(numels, options.buckets);
  parts.shards = std::make_unique<ShardLayout>(*parts.layout, communicator.rank(), communicator.world_size());
  parts.exchange = std::make_unique<ShardExchange>(*parts.shards, communicator);
  parts.parameters =
      std::make_unique<ParameterBuckets>(device, *parts.layout, std::move(parameters), std::move(names), options.dtype);
  build_home(options, device, memory, parts);
  parts.judge = device.make_judge();
  parts.pipeline = std::make_unique<UpdatePipeline>(
      UpdatePipelineParts{device, *parts.shards, communicator, *parts.exchange, *parts.parameters, *parts.gradients,
                          *parts.routes, options.algorithm, state_format_of(options.dtype),
                          kernels::state_names(options.algorithm, options.momentum), options.initial_state1});
  parts.pipeline->initialize();
  parts.reducer = std::make_unique<GradientReducer>(GradientReducerParts{device, *parts.shards, *parts.parameters,
                                                                         *parts.gradients, communicator, *parts.judge,
                                                                         sharing_of(options, device, parts)});
  if (parts.tide) {
    parts.pilot = std::make_unique<TidePilot>(device, *parts.tide, *parts.routes, options.device_budget);
  }
  if (parts.tide && options.overlap_step) {
    parts.overlap = std::make_unique<StepOverlap>(
        StepOverlapParts{device, *parts.layout, *parts.parameters, *parts.pipeline, *parts.routes, *parts.up},
        HostUpdaterOptions{options.algorithm, state_format_of(options.dtype), options.movers.delay_seed,
                           update_threads(options, device), parts.down.get()});
  }
  return parts;
}

}  // namespace pannier
