#include "pannier/engine/engine_core.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <tuple>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/engine/unmanaged_tensors.h"

namespace pannier {
namespace {

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
  if (config_.zero.stage == 3 && communicator_->world_size() > 1) {
    throw ConfigError(fmt::format(
        "zero_optimization.stage 3 with {} ranks is not supported by this version, which partitions optimizer "
        "states and gradients (stages 1 and 2)",
        communicator_->world_size()));
  }
  check_inputs(inputs);
  require_separate_memory(inputs);
  agree(inputs);
  HostMemoryOptions host;
  host.budget_bytes = config_.pannier.host_memory_nbytes.value_or(std::numeric_limits<std::size_t>::max());
  host_memory_ = std::make_unique<HostMemory>(host);

  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::vector<std::int64_t> numels;
  UnmanagedTensors unmanaged;
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    const at::Tensor& parameter = inputs.parameters[i];
    const bool trained = inputs.algorithm && inputs.group_of[i] >= 0 && parameter.requires_grad();
    managed_of_.push_back(trained ? static_cast<int>(parameters.size()) : -1);
    if (trained) {
      parameters.push_back(parameter);
      names.push_back(inputs.names[i]);
      numels.push_back(parameter.numel());
      group_of_.push_back(inputs.group_of[i]);
    } else {
      unmanaged.add(parameter, unmanaged_dtype(parameter));
    }
  }
  for (const auto& buffer : inputs.buffers) {
    unmanaged.add(buffer, buffer.scalar_type());
  }
  PartsOptions options =
      parts_options(config_, inputs.algorithm.value_or(kernels::Algorithm::kAdamW), inputs.groups, batch_.accumulation);
  options.initial_state1 = inputs.algorithm == kernels::Algorithm::kAdagrad ? inputs.initial_accumulator_value : 0.0;
  const MemoryPlanInput input =
      plan_input(options, numels, unmanaged.nbytes(), communicator_->rank(), communicator_->world_size());
  plan_ = plan_memory(input);
  require_room(input, inputs.parameters);
  {
    const OwnerScope scope(Owner::kParameters);
    unmanaged.move(device_->torch_device());
  }
  share_unmanaged(inputs);
  if (inputs.algorithm) {
    algorithm_ = *inputs.algorithm;
    steps_.resize(parameters.size());
    parts_ = std::make_unique<Parts>(
        build_parts(options, *device_, *host_memory_, *communicator_, std::move(parameters), std::move(names)));
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

// On the CPU the device's memory and the host's are one, so there is nothing to gain by a stream.
void EngineCore::plan_routes(const PartsOptions& options, const MemoryPlanInput& plan) {
  if (config_.pannier.streamed_share || device_->torch_device().is_cpu()) {
    return;
  }
  SplitInput input = split_input(plan.shape, parts_->shards->numel(), options.accumulates && !options.sum_in_own_type);
  input.overlap_step = config_.pannier.overlap_step;
  input.micro_batches = batch_.accumulation;
  route_planner_ = std::make_unique<RoutePlanner>(
      RoutePlannerParts{*device_, shards_of(plan), *parts_->routes, *parts_->pipeline, *parts_->pilot, input},
      machine_rates(*device_));
}

EngineCore::~EngineCore() {
  close();
  if (process_ != getpid()) {
    // A forked child has none of the threads that the parts wait for when they end: it lets them be.
    (void)parts_.release();
  }
}

void EngineCore::check_inputs(const EngineInputs& inputs) const {
  PANNIER_CHECK(inputs.names.size() == inputs.parameters.size() && inputs.group_of.size() == inputs.names.size(),
                "names, parameters and groups differ in number");
  for (std::size_t i = 0; i < inputs.names.size(); ++i) {
    const at::Tensor& parameter = inputs.parameters[i];
    const std::string& name = inputs.names[i];
    const bool will_come = inputs.device.has_value() && parameter.device().is_cpu();
    if (parameter.device() != device_->torch_device() && !will_come) {
      throw ConfigError(fmt::format("parameter {} is on {}, expected {}", name, parameter.device().str(),
                                    device_->torch_device().str()));
    }
    if (parameter.layout() != at::kStrided) {
      throw ConfigError(fmt::format("parameter {} is sparse, expected a dense tensor", name));
    }
    if (inputs.group_of[i] >= static_cast<int>(inputs.groups.size())) {
      throw ConfigError(
          fmt::format("parameter {} is in group {} of {}", name, inputs.group_of[i], inputs.groups.size()));
    }
    if (inputs.group_of[i] < 0 || !parameter.requires_grad() || !inputs.algorithm) {
      continue;
    }
    if (!parameter.is_leaf()) {
      throw ConfigError(fmt::format("parameter {} is the result of a computation, expected a leaf", name));
    }
    if (GradientHook::is_hooked(parameter)) {
      throw ConfigError(
          fmt::format("parameter {}: the model is already managed by an engine; call its destroy() first", name));
    }
    const at::ScalarType dtype = parameter.scalar_type();
    const bool convertible = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
    if (!convertible || (config_.dtype == Dtype::kFp32 && dtype != at::kFloat)) {
      throw ConfigError(fmt::format(
          "parameter {} is {}, expected Float{}", name, c10::toString(dtype),
          convertible ? "; to train in 16 bits set \"bf16\": {\"enabled\": true} or the same of \"fp16\"" : ""));
    }
  }
}

// Ranks that differ here would exchange one thing for another; what differs is said before anything has moved.
void EngineCore::agree(const EngineInputs& inputs) {
  std::string parameters;
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    const at::Tensor& parameter = inputs.parameters[i];
    parameters += fmt::format("{} {} {} group {}{}\n", inputs.names[i], c10::toString(parameter.scalar_type()),
                              parameter.sizes().vec(), inputs.group_of[i], parameter.requires_grad() ? "" : " frozen");
  }
  communicator_->agree("configuration", config_.to_json());
  communicator_->agree("parameters", parameters);
}

void EngineCore::share_unmanaged(const EngineInputs& inputs) {
  const c10::NoGradGuard no_grad;
  if (communicator_->world_size() == 1) {
    return;
  }
  const auto share = [this](const at::Tensor& tensor) {
    const at::Tensor common = tensor.detach().contiguous();
    communicator_->broadcast(common, 0);
    if (!common.is_same(tensor) && common.data_ptr() != tensor.data_ptr()) {
      tensor.detach().copy_(common);
    }
  };
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    if (managed_of_[i] < 0) {
      share(inputs.parameters[i]);
    }
  }
  for (const at::Tensor& buffer : inputs.buffers) {
    share(buffer);
  }
}

void EngineCore::require_separate_memory(const EngineInputs& inputs) const {
  std::vector<std::tuple<const char*, const char*, std::size_t>> ranges;
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    const at::Tensor& parameter = inputs.parameters[i];
    if (parameter.numel() > 0 && parameter.is_non_overlapping_and_dense()) {
      const auto* begin = static_cast<const char*>(parameter.data_ptr());
      ranges.emplace_back(begin, begin + parameter.nbytes(), i);
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (std::get<0>(ranges[i]) < std::get<1>(ranges[i - 1])) {
      throw ConfigError(fmt::format(
          "parameters {} and {} share memory but are two parameters, so they would be trained apart; tie them "
          "by using one Parameter object for both",
          inputs.names[std::get<2>(ranges[i - 1])], inputs.names[std::get<2>(ranges[i])]));
    }
  }
}

void EngineCore::require_room(const MemoryPlanInput& input, const std::vector<at::Tensor>& moved) const {
  MemoryBudget budget{.device_nbytes = config_.pannier.device_memory_nbytes.value_or(device_->memory().cap),
                      .host_nbytes = config_.pannier.host_memory_nbytes.value_or(0)};
  if (budget.device_nbytes != 0) {
    // What is in use already and will not move into the plan's own memory counts against the budget too.
    std::size_t in_use = device_->memory().current;
    for (const auto& tensor : moved) {
      in_use -= device_->counts(tensor) ? std::min(in_use, tensor.nbytes()) : 0;
    }
    budget.device_nbytes = budget.device_nbytes > in_use ? budget.device_nbytes - in_use : 1;
  }
  const auto free = device_->free_nbytes();
  if (free && budget.device_nbytes == 0) {
    budget.device_nbytes = *free;
    for (const auto& tensor : moved) {
      budget.device_nbytes += device_->counts(tensor) ? tensor.nbytes() : 0;
    }
  }
  require_fit(input, budget);
  // What can't be had must be refused before the first parameter moves; the CPU's device memory is the machine's too.
  const std::size_t wanted = plan_.host() + (free ? 0 : plan_.device_optimizer_states + plan_.device_parameters);
  if (const std::size_t available = HostMemory().free_bytes(); wanted > available) {
    throw OutOfMemoryError("host", "training state", wanted, available);
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
  if (index < 0) {
    throw ConfigError(fmt::format("parameter {} is not trained by this engine, so it has no state", parameter));
  }
  return index;
}

bool EngineCore::is_boundary() const noexcept {
  return boundary_.value_or(!config_.managed_gradient_accumulation || micro_in_window_ + 1 >= batch_.accumulation);
}

void EngineCore::set_batch(const BatchSizes& batch) { batch_ = batch; }

std::pair<at::Tensor, at::Tensor> EngineCore::begin_backward(const at::Tensor& loss, bool scale_by_accumulation) {
  require_open();
  if (!parts_) {
    throw ConfigError("backward() needs an optimizer; this engine was initialized without one");
  }
  if (loss.numel() != 1 || !loss.requires_grad()) {
    throw ConfigError(
        fmt::format("backward() takes a loss of one element that depends on the parameters, got {} elements{}",
                    loss.numel(), loss.requires_grad() ? "" : " that require no gradient"));
  }
  require_outside_backward("backward()");
  if (parts_->reducer->in_backward()) {
    parts_->reducer->end_backward();  // One that the caller ran himself.
  }
  if (!lost_micro_batches_ && !parts_->reducer->backward_failed()) {
    broken_ = false;  // What failed was a window of one micro-batch, which is gone.
  }
  wait_for_parameters();
  parts_->reducer->renew_hooks();
  const bool divide = scale_by_accumulation && batch_.accumulation > 1 && config_.managed_gradient_accumulation;
  const at::Tensor reported = divide ? loss / static_cast<double>(batch_.accumulation) : loss;
  const double factor = scaler_.scale();
  const at::Tensor scaled = factor == 1.0 ? reported : reported.to(at::kFloat) * factor;
  open_backward();
  in_own_backward_ = true;
  has_backward_ = true;
  return {reported, scaled};
}

void EngineCore::open_backward() {
  if (parts_->overlap) {
    parts_->overlap->wait_for_updates();  // New gradients go where they read theirs.
  }
  tracer_.begin_backward();
  parts_->reducer->begin_backward(is_boundary());
  if (parts_->pilot) {
    parts_->pilot->begin_backward(is_boundary());
  }
  if (route_planner_) {
    route_planner_->mark_backward();
  }
}

void EngineCore::tick_forward(int unit) {
  require_open();
  tracer_.tick_forward(unit);
  const auto begin = std::chrono::steady_clock::now();
  if (parts_ && parts_->pilot) {
    parts_->gradients->free_sent(/*wait=*/false);
    parts_->pilot->tick_forward(unit);
  }
  wait_for_unit(unit);
  if (route_planner_ && unit == 0) {
    route_planner_->mark_forward();
  } else if (route_planner_) {
    route_planner_->saw_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
}

void EngineCore::end_backward() {
  require_open();
  try {
    parts_->reducer->end_backward();
  } catch (const std::exception& error) {
    abort_backward(error.what());
    throw;
  }
  in_own_backward_ = false;
  tracer_.end_backward();
}

void EngineCore::abort_backward(const std::string& why) {
  require_open();
  lost_micro_batches_ = lost_micro_batches_ || micro_in_window_ > 0;
  in_own_backward_ = false;
  communicator_->report_failure(fmt::format("its backward failed: {}", why));
  drop_gradients();
  broken_ = true;
}

at::Tensor EngineCore::scale(const at::Tensor& loss) {
  auto [reported, scaled] = begin_backward(loss, true);
  in_own_backward_ = false;  // The caller runs it; its end is seen by the next call.
  return scaled;
}

void EngineCore::begin_unannounced_backward(int parameter) {
  if (batch_.accumulation > 1 || scaler_.scale() != 1.0) {
    throw ConfigError(
        fmt::format("a gradient of {} came from a backward that was not the engine's, which must divide the loss by "
                    "the accumulation steps "
                    "and multiply it by the loss scale; call engine.backward(loss) or engine.scale(loss).backward(). "
                    "If this engine is not "
                    "to train in that backward, freeze its parameters with requires_grad_(False)",
                    parts_->parameters->name(parameter)));
  }
  open_backward();
  has_backward_ = true;
}

void EngineCore::require_outside_backward(const char* call) const {
  if (in_own_backward_) {
    throw ConfigError(fmt::format(
        "{} was called inside a backward, from a hook for instance; call it after backward() has returned", call));
  }
}

void EngineCore::refuse_broken_window() {
  drop_gradients();
  broken_ = false;
  lost_micro_batches_ = false;
  has_backward_ = false;
  throw ConfigError(
      "step() after a backward that failed: the gradients of its accumulation window were dropped, nothing was "
      "updated");
}

StepOutcome EngineCore::step(const std::vector<kernels::Hyperparameters>& groups) {
  require_open();
  if (!parts_) {
    throw ConfigError("step() needs an optimizer; this engine was initialized without one");
  }
  if (groups.size() != num_groups_) {
    throw ConfigError(fmt::format("step() got {} parameter groups, the engine has {}", groups.size(), num_groups_));
  }
  require_outside_backward("step()");
  auto phase = tracer_.phase("step");
  wait_for_parameters();
  if (parts_->overlap && route_planner_) {
    if (const HostUpdateTime seen = parts_->overlap->take_time(); seen.numel > 0) {
      route_planner_->saw_host_update(seen.numel, seen.seconds);
    }
  }
  GradientReducer& reducer = *parts_->reducer;
  if (broken_ || reducer.backward_failed()) {
    refuse_broken_window();
  }
  if (!has_backward_) {
    throw ConfigError("step() before backward(): there is no gradient to apply");
  }
  if (reducer.in_backward()) {
    end_backward();
  }
  try {
    reducer.check_hooks();
  } catch (const ConfigError&) {
    drop_gradients();
    throw;
  }
  has_backward_ = false;
  if (!is_boundary()) {
    ++counters_.micro_steps;
    ++micro_in_window_;
    return StepOutcome::kAccumulating;
  }
  parts_->pipeline->take_edits(parts_->parameters->take_edits(true));
  if (parts_->pilot) {
    parts_->pilot->tick_update();
  }
  if (route_planner_) {
    route_planner_->mark_update();
  }
  parts_->exchange->set_step(counters_.global_steps);
  reducer.finish_window();
  require_all_used();
  const Verdict verdict = update(groups);
  const bool skip = verdict.decision.skip != 0;
  reducer.drop_window(true);
  if (route_planner_) {
    route_planner_->end_step();  // A bucket that changes its route must hold no gradient.
  }
  overflow_ = skip;
  micro_in_window_ = 0;
  ++counters_.micro_steps;
  ++counters_.global_steps;
  counters_.global_samples += batch_.train;
  if (skip) {
    skip_step(verdict);
  } else {
    scaler_.update(false, {});
  }
  phase.end();
  tracer_.end_step(counters_.global_steps);
  return skip ? StepOutcome::kSkipped : StepOutcome::kApplied;
}

void EngineCore::skip_step(const Verdict& verdict) {
  ++counters_.skipped_steps;
  const int first = verdict.first_nonfinite_parameter;
  const std::string name = first < 0 ? "a parameter of another rank" : parts_->parameters->name(first);
  log::warning(fmt::format("step {} skipped: {} gradient elements are not finite, first in {}; loss scale {}",
                           counters_.global_steps, verdict.decision.num_nonfinite, name, scaler_.scale()));
  scaler_.update(true, name);
}

void EngineCore::require_all_used() {
  for (std::size_t i = 0; i < steps_.size() && !config_.zero.ignore_unused_parameters; ++i) {
    if (!parts_->reducer->used(static_cast<int>(i))) {
      drop_gradients();
      throw ConfigError(
          fmt::format("parameter {} got no gradient, and zero_optimization.ignore_unused_parameters is false",
                      parts_->parameters->name(static_cast<int>(i))));
    }
  }
}

// What the device updates is issued before the host knows the decision, so that the device never waits for the host.
Verdict EngineCore::update(const std::vector<kernels::Hyperparameters>& groups) {
  parts_->judge->decide({gradient_scale(), config_.gradient_clipping, config_.check_grad_overflow});
  UpdatePipeline::Coefficients coefficients(steps_.size());
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    if (parts_->reducer->used(static_cast<int>(i))) {
      const auto& group = groups[static_cast<std::size_t>(group_of_[i])];
      coefficients[i] = kernels::make_coefficients(algorithm_, group, steps_[i] + 1, 1.0F);
    }
  }
  parts_->pipeline->update_on_device(coefficients, parts_->judge->control());
  auto phase = tracer_.phase("wait for the decision");
  const Verdict verdict = parts_->judge->verdict();
  phase.end();
  grad_norm_ = verdict.decision.norm;
  if (verdict.decision.skip == 0) {
    update_on_host(coefficients, verdict.decision.grad_factor);
    parts_->pipeline->publish(coefficients);
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      steps_[i] += coefficients[i] ? 1 : 0;
    }
  }
  if (parts_->pilot) {
    parts_->pilot->end_step();
  }
  return verdict;
}

void EngineCore::update_on_host(const UpdatePipeline::Coefficients& coefficients, float grad_factor) {
  if (parts_->overlap) {
    parts_->overlap->begin(coefficients, grad_factor);
    // Other ranks are given what was updated here before step() returns.
    if (communicator_->world_size() > 1 || (route_planner_ && route_planner_->wants_clean_step())) {
      parts_->overlap->wait_for_all();
    }
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  const std::int64_t numel = parts_->pipeline->update_on_host(coefficients, grad_factor);
  if (route_planner_ && numel > 0) {
    route_planner_->saw_host_update(numel,
                                    std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
}

void EngineCore::drop_gradients() {
  require_open();
  require_outside_backward("drop_gradients()");
  if (parts_) {
    parts_->reducer->drop_window(false);
  }
  micro_in_window_ = 0;
  has_backward_ = false;
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
  tracer_.close();
  route_planner_.reset();
  parts_.reset();
  communicator_->close();
  if (cap_) {
    device_->remove_memory_cap(*cap_);
  }
}

}  // namespace pannier
