#include "pannier/engine/engine_core.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/engine/checkpoint_saver.h"
#include "pannier/engine/unmanaged_tensors.h"
#include "pannier/tier/nvme_staging.h"

namespace pannier {
namespace {

// An engine that ends can tell nobody but the log.
template <class Action>
void log_failure(const char* what, Action action) noexcept {
  try {
    action();
  } catch (const std::exception& error) {
    log::warning(fmt::format("{}: {}", what, error.what()));
  }
}

at::ScalarType scalar_type_of(Dtype dtype) {
  return dtype == Dtype::kFp32 ? at::kFloat : dtype == Dtype::kFp16 ? at::kHalf : at::kBFloat16;
}

// Where nobody says, the first parameter does; the others must be there too.
c10::Device device_of(const EngineInputs& inputs) {
  if (inputs.device) {
    return *inputs.device;
  }
  return inputs.parameters.empty() ? c10::Device(c10::DeviceType::CPU) : inputs.parameters.front().device();
}

// Whoever starts several processes on a node says which one each is.
bool is_first_of_node(int rank) {
  const char* local = std::getenv("LOCAL_RANK");
  return (local == nullptr ? rank : std::atoi(local)) == 0;
}

}  // namespace

PartsOptions parts_options(const Config& config, kernels::Algorithm algorithm,
                           const std::vector<kernels::Hyperparameters>& groups, std::int64_t accumulation_steps) {
  PartsOptions options;
  options.stage = config.zero.stage;
  options.optimizer_home = config.zero.optimizer_home;
  options.dtype = scalar_type_of(config.dtype);
  options.algorithm = algorithm;
  for (const auto& group : groups) {
    options.momentum = std::max(options.momentum, group.momentum);
  }
  options.accumulates = accumulation_steps > 1;
  options.sum_in_own_type = config.grad_accum_dtype != Dtype::kFp32;
  options.buckets.bucket_numel = config.zero.bucket_numel;
  options.streamed_share = config.pannier.streamed_share.value_or(0.0);
  options.movers.delay_seed = config.pannier.stress_seed;
  options.device_budget = config.pannier.device_memory_nbytes;
  options.overlap_step = config.pannier.overlap_step;
  options.update_threads = config.pannier.threads;
  options.nvme.folders = config.zero.optimizer_nvme_paths;
  options.nvme.buffer_count = static_cast<std::size_t>(config.zero.buffer_count);
  options.nvme.buffer_nbytes = config.zero.buffer_nbytes;
  options.host_budget = config.pannier.host_memory_nbytes;
  options.sharding.parameter_home = config.zero.param_home;
  const std::size_t width = c10::elementSize(options.dtype);
  options.sharding.nvme = {.folders = config.zero.param_nvme_paths,
                           .buffer_count = static_cast<std::size_t>(config.zero.param_buffer_count),
                           .buffer_nbytes = nbytes_of(config.zero.param_buffer_numel, width),
                           .host_nbytes = nbytes_of(config.zero.param_max_in_host_numel, width),
                           .owner = "parameters",
                           .buffer_key = "zero_optimization.offload_param.buffer_size"};
  options.sharding.prefetch_numel = config.zero.prefetch_bucket_numel.value_or(options.sharding.prefetch_numel);
  options.sharding.node_size = config.zero.node_size > 1 ? config.zero.node_size : 0;
  options.sharding.persistence_numel = config.zero.param_persistence_numel.value_or(options.sharding.persistence_numel);
  return options;
}

EngineCore::EngineCore(Config config, EngineInputs inputs, BatchSizes batch)
    : config_(std::move(config)),
      batch_(batch),
      device_(make_device(device_of(inputs))),
      tracer_(*device_, {config_.pannier.trace_file.value_or(""), config_.pannier.trace_step}),
      communicator_(inputs.communicator ? std::move(inputs.communicator) : make_solo_communicator()),
      num_groups_(inputs.groups.size()),
      scaler_(config_.effective_loss_scale()),
      process_(getpid()) {
  config_.require_supported();
  check_inputs(inputs);
  require_separate_memory(inputs);
  agree(inputs);
  HostMemoryOptions host;
  host.budget_bytes = config_.pannier.host_memory_nbytes.value_or(std::numeric_limits<std::size_t>::max());
  host_memory_ = std::make_unique<HostMemory>(host);

  PartsOptions options =
      parts_options(config_, inputs.algorithm.value_or(kernels::Algorithm::kAdamW), inputs.groups, batch_.accumulation);
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> shares;  // Of `parameters`.
  std::vector<std::string> names;
  std::vector<std::int64_t> numels;
  for (const std::size_t i : number_parameters(inputs, options)) {
    parameters.push_back(inputs.parameters[i]);
    shares.push_back(inputs.is_shared_out(i) ? inputs.shares[i] : at::Tensor());
    names.push_back(inputs.names[i]);
    numels.push_back(inputs.parameters[i].numel());
  }
  std::vector<at::Tensor> with_memory;
  UnmanagedTensors unmanaged;
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    if (!inputs.is_shared_out(i)) {
      with_memory.push_back(inputs.parameters[i]);
    }
    if (managed_of_[i] < 0) {
      if (inputs.is_shared_out(i)) {
        throw ConfigError(
            fmt::format("parameter '{}' was partitioned while the model was built and is not trained, which needs "
                        "zero_optimization.stage 3 and an optimizer",
                        inputs.names[i]));
      }
      unmanaged.add(inputs.parameters[i], unmanaged_dtype(inputs.parameters[i]));
    }
  }
  for (const auto& buffer : inputs.buffers) {
    unmanaged.add(buffer, buffer.scalar_type());
  }
  knows_units_ = !inputs.units.empty();
  for (const auto& unit : inputs.units) {
    options.sharding.units.push_back(managed(unit));
  }
  options.initial_state1 = inputs.algorithm == kernels::Algorithm::kAdagrad ? inputs.initial_accumulator_value : 0.0;
  require_whole_nodes(options.sharding.node_size);
  const MemoryPlanInput input = whole_plan_input(options, numels, unmanaged.nbytes());
  options.nvme.host_nbytes = input.nvme_states.host_nbytes;
  for (NvmeStateOptions* const nvme : {&options.nvme, &options.sharding.nvme}) {
    nvme->rank = communicator_->rank();
    nvme->takes_lock = is_first_of_node(communicator_->rank());
    nvme->hook = inputs.disk_hook;
  }
  plan_ = plan_memory(input);
  require_room(input, with_memory);
  {
    const OwnerScope scope(Owner::kParameters);
    unmanaged.move(device_->torch_device());
  }
  share_unmanaged(inputs);
  if (inputs.algorithm) {
    algorithm_ = *inputs.algorithm;
    steps_.resize(group_of_.size());
    parts_ = std::make_unique<Parts>(build_parts(options, *device_, *host_memory_, *communicator_,
                                                 std::move(parameters), std::move(names), std::move(shares)));
    parts_->reducer->on_unannounced([this](int parameter) { begin_unannounced_backward(parameter); });
    if (parts_->pilot) {
      parts_->reducer->on_closed([pilot = parts_->pilot.get()](int bucket) { pilot->tick_backward(bucket); });
      plan_routes(options, input);
    }
  }
  if (config_.pannier.device_memory_nbytes) {
    device_->add_memory_cap(*config_.pannier.device_memory_nbytes);
    cap_ = config_.pannier.device_memory_nbytes;
  }
  if (config_.pannier.memory_timeline) {
    device_->start_timeline();
  }
}

// With what a save takes beside training, which comes before states that are kept off the disk.
MemoryPlanInput EngineCore::whole_plan_input(PartsOptions& options, const std::vector<std::int64_t>& numels,
                                             std::size_t unmanaged_nbytes) const {
  const auto plan = [&] {
    return plan_input(options, numels, unmanaged_nbytes, communicator_->rank(), communicator_->world_size());
  };
  MemoryPlanInput input = plan();
  if (!config_.async_checkpoint || numels.empty()) {
    return input;
  }
  const std::vector<std::int64_t>& shards = shards_of(input);
  const std::int64_t numel = std::accumulate(shards.begin(), shards.end(), std::int64_t{0});
  const std::size_t files = nbytes_of(numel, 4) * (1 + static_cast<std::size_t>(input.shape.num_states));
  const std::size_t chunk =
      options.optimizer_home == Home::kNvme ? nvme_staging(input.shape, shards, options.nvme).chunk_nbytes : 0;
  const std::size_t nbytes = ckpt::FileMoverOptions::for_files_of(files).nbytes() + StateSnapshot::nbytes(chunk);
  if (options.host_budget) {
    *options.host_budget -= std::min(*options.host_budget, nbytes);
    input = plan();
  }
  input.checkpoint_nbytes = nbytes;
  return input;
}

// On the CPU the device's memory and the host's are one, so there is nothing to gain by a stream.
void EngineCore::plan_routes(const PartsOptions& options, const MemoryPlanInput& plan) {
  if (config_.pannier.streamed_share || device_->torch_device().is_cpu()) {
    return;
  }
  SplitInput input = split_input(plan.shape, parts_->shards->numel(), options.accumulates && !options.sum_in_own_type,
                                 !plan.is_partitioned.empty() && plan.parameter_home == Home::kHost);
  input.overlap_step = config_.pannier.overlap_step;
  input.micro_batches = batch_.accumulation;
  route_planner_ =
      std::make_unique<RoutePlanner>(RoutePlannerParts{*device_, shards_of(plan), *parts_->routes, *parts_->pipeline,
                                                       *parts_->pilot, *parts_->down, input},
                                     machine_rates(*device_));
}

EngineCore::~EngineCore() {
  close();
  if (process_ != getpid()) {
    // A forked child has none of the threads that the parts wait for when they end: it lets them be.
    (void)save_.release();
    (void)parts_.release();
  }
}

at::ScalarType EngineCore::unmanaged_dtype(const at::Tensor& parameter) const {
  const bool converts = parameter.is_floating_point() && config_.dtype != Dtype::kFp32;
  return converts ? scalar_type_of(config_.dtype) : parameter.scalar_type();
}

void EngineCore::require_open() const {
  if (closed_) {
    throw ConfigError("this engine was destroyed; call initialize again to train this model");
  }
}

int EngineCore::managed_index(int parameter) const {
  require_open();
  PANNIER_CHECK(parameter >= 0 && parameter < static_cast<int>(managed_of_.size()),
                fmt::format("parameter {}", parameter));
  const int index = managed_of_[static_cast<std::size_t>(parameter)];
  if (index < 0 || index >= static_cast<int>(steps_.size())) {
    throw ConfigError(fmt::format("parameter {} is not trained by this engine, so it has no state", parameter));
  }
  return index;
}

void EngineCore::reset_peaks() {
  device_->reset_peak();
  host_memory_->reset_peak();
}

void EngineCore::close() noexcept {
  if (closed_ || process_ != getpid()) {
    return;
  }
  closed_ = true;
  log_failure("the last checkpoint could not be written", [this] { finish_checkpoint(); });
  tracer_.close();
  route_planner_.reset();
  parts_.reset();
  communicator_->close();
  if (cap_) {
    device_->remove_memory_cap(*cap_);
  }
}

std::vector<HandedOver> EngineCore::close_and_hand_over() noexcept {
  std::vector<HandedOver> left;
  if (!closed_ && process_ == getpid() && parts_ != nullptr) {
    log_failure("the last checkpoint could not be written", [this] { finish_checkpoint(); });
    log_failure("the partitioned parameters of an engine that ends are lost", [&] {
      synchronize();
      if (const auto cap = std::exchange(cap_, std::nullopt)) {
        device_->remove_memory_cap(*cap);
      }
      left = hand_over(*parts_, managed_of_);
    });
  }
  close();
  return left;
}

}  // namespace pannier
