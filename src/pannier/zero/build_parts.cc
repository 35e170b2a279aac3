#include "pannier/zero/build_parts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <map>
#include <numeric>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/device/dtype.h"
#include "pannier/zero/bucket_names.h"
#include "pannier/zero/first_values.h"
#include "pannier/zero/parts_plan.h"

namespace pannier {
namespace {

std::vector<UpdateRoute> choose_routes(const PartsOptions& options, const ShardLayout& shards) {
  if (options.optimizer_home == Home::kDevice) {
    return std::vector<UpdateRoute>(static_cast<std::size_t>(shards.buckets().num_buckets()), UpdateRoute::kDevice);
  }
  return assign_routes(shards.numels(), {.host = 1.0 - options.streamed_share});
}

// This rank's part of a bucket's parameters, on the device.
std::function<at::Tensor(int)> own_parameters(const Parts& parts) {
  return [residence = parts.residence.get()](int bucket) { return residence->own(bucket); };
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
//
// A disk binds long before cores do: one thread updates and checks what moves at some 4 GB/s. More of them only take
// cores from the thread that feeds the disk, and where cores are scarce wait for each other at every chunk.
int update_threads(const PartsOptions& options, const Device& device) {
  const int all = host_threads();
  if (options.optimizer_home == Home::kNvme && options.update_threads == 0) {
    constexpr int kMostForADisk = 4;
    return std::clamp(all / 2, 1, kMostForADisk);
  }
  if (options.update_threads > 0 || device.torch_device().is_cpu()) {
    return options.update_threads;
  }
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

// A parameter in no unit is read by the model's forward itself; where units are not known, so is every one.
std::vector<std::vector<int>> complete_units(const PartsOptions& options, int num_parameters) {
  std::vector<std::vector<int>> units = options.sharding.units;
  units.resize(std::max<std::size_t>(units.size(), 1));
  std::vector<bool> is_known(static_cast<std::size_t>(num_parameters));
  for (const auto& unit : units) {
    for (const int parameter : unit) {
      is_known[static_cast<std::size_t>(parameter)] = true;
    }
  }
  for (int i = 0; i < num_parameters; ++i) {
    if (!is_known[static_cast<std::size_t>(i)]) {
      units.front().push_back(i);
    }
  }
  return units;
}

// A folder that one rank can't use, another run's say, ends the start of all with that rank's error, before anybody
// waits for it in a collective.
void share_opening(Communicator& communicator, const std::function<void()>& open) {
  std::exception_ptr error;
  std::string text;
  try {
    open();
  } catch (const IoError& caught) {
    error = std::current_exception();
    text = caught.what();
  }
  const std::vector<std::string> texts =
      communicator.world_size() == 1 ? std::vector{text} : communicator.share_texts("opening of disks", text);
  if (error) {
    std::rethrow_exception(error);
  }
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) {
      throw IoError(fmt::format("rank {}: {}", rank, texts[rank]), EIO);
    }
  }
}

// Opens a store on disks, with this rank's part of a common start.
template <class Open>
void open_on_disk(const NvmeStateOptions& given, Communicator& communicator, Parts& parts, Open&& open) {
  NvmeStateOptions options = given;
  options.label = [shards = parts.model_shards.get(), parameters = parts.parameters.get()](int bucket,
                                                                                           const ElementRange& range) {
    return names_in(*shards, bucket, range, [parameters](int parameter) { return parameters->name(parameter); });
  };
  NvmeStateStore* store = nullptr;
  share_opening(communicator, [&] { store = open(options); });
  for (const std::string& note : store->notes()) {
    log::warning(note);
  }
}

void build_nvme_shards(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                       Parts& parts) {
  open_on_disk(options.sharding.nvme, communicator, parts, [&](const NvmeStateOptions& nvme) {
    auto shards =
        std::make_unique<NvmeShards>(device, memory, *parts.up, *parts.down,
                                     resting_shards(options, *parts.model_layout, parts.model_shards->numels()), nvme);
    parts.nvme_shards = shards.get();
    parts.parameter_shards = std::move(shards);
    return &parts.nvme_shards->disk();
  });
  for (const std::span<std::byte> region : parts.nvme_shards->disk().regions()) {
    register_host(device, region, "nvme staging", parts);
  }
}

void build_residence(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                     Parts& parts) {
  if (!shards_parameters(options, parts.shards->world_size())) {
    parts.residence = make_whole_residence(*parts.shards, *parts.parameters);
    return;
  }
  const auto make_shards = [&](const std::vector<std::int64_t>& numels) {
    const std::vector<RestingShard> sizes = resting_shards(options, *parts.model_layout, numels);
    if (options.sharding.parameter_home == Home::kDevice) {
      return make_device_shards(device, sizes);
    }
    auto shards = make_host_shards(device, memory, *parts.up, *parts.down, sizes);
    register_host(device, shards->host_bytes(), "parameters", parts);
    return shards;
  };
  if (options.sharding.parameter_home == Home::kNvme) {
    build_nvme_shards(options, device, memory, communicator, parts);
  } else {
    parts.parameter_shards = make_shards(parts.model_shards->numels());
  }
  const ShardLayout& all = *parts.model_shards;
  const std::vector<std::int64_t> for_node = node_numels_of(all);
  parts.gathering = for_node.empty()
                        ? make_flat_gathering(all, *parts.exchange, *parts.parameter_shards)
                        : make_node_gathering(all, *parts.exchange, *parts.parameter_shards, make_shards(for_node));
  std::function<void(const std::string&)> on_failure;
  if (parts.nvme_shards != nullptr && communicator.world_size() > 1) {
    on_failure = [&communicator](const std::string& why) {
      communicator.report_failure(fmt::format("its disk failed: {}", why));
    };
  }
  auto gatherer = std::make_unique<ParameterGatherer>(
      ParameterGathererParts{device, all, *parts.parameters, *parts.gathering, *parts.parameter_shards},
      ParameterGathererOptions{complete_units(options, parts.model_layout->num_parameters()),
                               options.sharding.prefetch_numel, parts.layout->num_buckets(), on_failure});
  parts.gatherer = gatherer.get();
  parts.residence = std::move(gatherer);
}

// Where the host has a bucket's parameters because they rest there.
std::vector<std::byte*> resting_addresses(const Parts& parts) {
  std::vector<std::byte*> addresses(static_cast<std::size_t>(parts.layout->num_buckets()), nullptr);
  for (int b = 0; parts.parameter_shards && b < parts.layout->num_buckets(); ++b) {
    addresses[static_cast<std::size_t>(b)] =
        parts.residence->rests_whole(b) ? nullptr : parts.parameter_shards->host_address(b);
  }
  return addresses;
}

// What the way to the host needs, wherever states rest beyond it.
void build_host_way(const PartsOptions& options, Device& device, HostMemory& memory,
                    const std::vector<std::byte*>& resting, Parts& parts) {
  parts.host_gradients = std::make_unique<HostGradients>(
      device, memory, *parts.shards, store_options(options, parts.shards->world_size()), *parts.down);
  register_host(device, parts.host_gradients->bytes(), "gradients", parts);
  parts.host_path = make_host_path(
      device, own_parameters(parts), *parts.up,
      [resting](int bucket) { return resting[static_cast<std::size_t>(bucket)] != nullptr; },
      [parameters = parts.parameters.get()](int bucket) { return parameters->has_memory(bucket); },
      update_threads(options, device));
  parts.gradients = make_routed_gradients(
      *parts.device_gradients, *parts.host_gradients, *parts.layout,
      [routes = parts.routes.get()](int bucket) { return routes->route(bucket) == UpdateRoute::kHost; });
}

void build_host_home(const PartsOptions& options, Device& device, HostMemory& memory, Parts& parts) {
  const StateShape shape = shape_of(options);
  const std::vector<std::byte*> resting = resting_addresses(parts);
  parts.host_states = std::make_unique<HostStateStore>(memory, shape, parts.shards->numels(), resting);
  register_host(device, parts.host_states->bytes(), "optimizer states", parts);
  build_host_way(options, device, memory, resting, parts);
  parts.tide = std::make_unique<Tide>(TideParts{
      device, *parts.host_states, *parts.up, *parts.down, shape, parts.shards->numels(), own_parameters(parts),
      [resting, shards = parts.parameter_shards.get()](int bucket) -> ParameterShards* {
        return resting[static_cast<std::size_t>(bucket)] == nullptr ? nullptr : shards;
      }});
}

void build_nvme_home(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                     Parts& parts) {
  const std::vector<std::byte*> resting = resting_addresses(parts);
  NvmeStateOptions given = options.nvme;
  given.most_threads = update_threads(options, device);
  open_on_disk(given, communicator, parts, [&](const NvmeStateOptions& nvme) {
    parts.nvme_states =
        std::make_unique<NvmeStateStore>(memory, shape_of(options), parts.shards->numels(), nvme, resting);
    return parts.nvme_states.get();
  });
  for (const std::span<std::byte> region : parts.nvme_states->regions()) {
    register_host(device, region, "nvme staging", parts);
  }
  build_host_way(options, device, memory, resting, parts);
}

void build_home(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                Parts& parts) {
  parts.device_gradients =
      make_device_gradients(device, parts.layout->num_parameters(), store_options(options, parts.shards->world_size()));
  parts.device_path = make_device_path(device);
  UpdateRoutes::Way on_device{nullptr, parts.device_path.get()};
  // The table is built first, since the gradients ask it; what it points to follows.
  const auto chosen = choose_routes(options, *parts.shards);
  if (options.optimizer_home == Home::kDevice) {
    parts.device_states = make_device_store(device, shape_of(options), parts.shards->numels(), own_parameters(parts));
    on_device.states = parts.device_states.get();
    parts.routes = std::make_unique<UpdateRoutes>(chosen, on_device, UpdateRoutes::Way{}, UpdateRoutes::Way{});
    parts.gradients = std::move(parts.device_gradients);
    return;
  }
  parts.routes = std::make_unique<UpdateRoutes>(chosen, on_device, UpdateRoutes::Way{}, UpdateRoutes::Way{});
  if (options.optimizer_home == Home::kNvme) {
    build_nvme_home(options, device, memory, communicator, parts);
    UpdateRoutes::Way streamed;
    if (options.streamed_share > 0.0) {
      parts.disk_tide =
          std::make_unique<DiskTide>(DiskTideParts{device, *parts.nvme_states, *parts.up, *parts.down,
                                                   shape_of(options), parts.shards->numels(), own_parameters(parts)});
      streamed = {parts.disk_tide.get(), parts.device_path.get()};
    }
    *parts.routes = UpdateRoutes(chosen, on_device, streamed, {parts.nvme_states.get(), parts.host_path.get()});
    return;
  }
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

void lay_out(const PartsOptions& options, const std::vector<std::int64_t>& numels, const Communicator& communicator,
             Parts& parts) {
  const int world_size = communicator.world_size();
  const int node_size = node_size_of(options, world_size);
  parts.layout = std::make_unique<BucketLayout>(trained_layout(options, numels, world_size));
  parts.shards = std::make_unique<ShardLayout>(*parts.layout, communicator.rank(), world_size, node_size);
  parts.model_layout = std::make_unique<BucketLayout>(model_layout(options, numels, world_size));
  parts.model_shards = std::make_unique<ShardLayout>(*parts.model_layout, communicator.rank(), world_size, node_size);
}

}  // namespace

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

std::vector<NvmeStateStore*> Parts::disk_stores() const {
  std::vector<NvmeStateStore*> stores;
  if (nvme_states) {
    stores.push_back(nvme_states.get());
  }
  if (nvme_shards != nullptr) {
    stores.push_back(&nvme_shards->disk());
  }
  return stores;
}

Parts build_parts(const PartsOptions& options, Device& device, HostMemory& memory, Communicator& communicator,
                  std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<at::Tensor> shares) {
  PANNIER_CHECK(0 <= options.stage && options.stage <= 3, fmt::format("stage {}", options.stage));
  std::vector<std::int64_t> numels;
  for (const auto& parameter : parameters) {
    numels.push_back(parameter.numel());
  }
  Parts parts;
  lay_out(options, numels, communicator, parts);
  communicator.explain_failures(bucket_names(*parts.model_layout, names));
  parts.exchange = std::make_unique<ShardExchange>(*parts.model_shards, communicator);
  parts.parameters =
      std::make_unique<ParameterBuckets>(device, *parts.model_layout, std::move(parameters), std::move(names),
                                         options.dtype, options.sharding.frozen_dtypes);
  if (options.optimizer_home != Home::kDevice || options.sharding.parameter_home != Home::kDevice) {
    parts.up = std::make_unique<Mover>(device, Queue::kUp, options.movers);
    parts.down = std::make_unique<Mover>(device, Queue::kDown, options.movers);
  }
  build_residence(options, device, memory, communicator, parts);
  build_home(options, device, memory, communicator, parts);
  parts.judge = device.make_judge();
  parts.pipeline = std::make_unique<UpdatePipeline>(
      UpdatePipelineParts{device, *parts.shards, communicator, *parts.exchange, *parts.parameters, *parts.residence,
                          *parts.gradients, *parts.routes, options.algorithm, state_format_of(options.dtype),
                          kernels::state_names(options.algorithm, options.momentum), options.initial_state1});
  parts.parameters->come_from([&](int parameter) {
    return joined_shares(communicator, device,
                         shares.empty() ? at::Tensor() : shares[static_cast<std::size_t>(parameter)]);
  });
  parts.pipeline->initialize();
  place_frozen(parts, communicator);
  parts.parameters->come_from(nullptr);
  parts.reducer = std::make_unique<GradientReducer>(GradientReducerParts{
      device, *parts.shards, *parts.parameters, *parts.gradients, communicator, *parts.judge,
      sharing_of(options, device, parts), parts.gatherer != nullptr && communicator.world_size() > 1});
  if (parts.tide) {
    parts.pilot = std::make_unique<TidePilot>(device, *parts.tide, *parts.routes, options.device_budget);
  }
  if ((parts.tide || parts.nvme_states) && options.overlap_step) {
    parts.overlap = std::make_unique<StepOverlap>(
        StepOverlapParts{device, *parts.layout, *parts.parameters, *parts.residence, *parts.pipeline, *parts.routes,
                         *parts.up},
        HostUpdaterOptions{options.algorithm, state_format_of(options.dtype), options.movers.delay_seed,
                           update_threads(options, device), parts.down.get()});
    if (parts.parameter_shards) {
      parts.parameter_shards->before_raise([overlap = parts.overlap.get(), layout = parts.layout.get()](int bucket) {
        if (bucket < layout->num_buckets()) {  // Frozen ones are never updated.
          overlap->wait_for(bucket);
        }
      });
    }
  }
  return parts;
}

}  // namespace pannier
