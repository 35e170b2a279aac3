// What an engine looks at before it changes anything: what it was given, whether the ranks agree, and whether there is
// room.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/engine/engine_core.h"
#include "pannier/engine/tensor_span.h"

namespace pannier {
namespace {

// The bytes from a parameter's first element to behind its last; of strided memory not all are its own.
struct Footprint {
  const char* begin;
  const char* end;
  std::size_t index;
  bool has_gaps;
};

Footprint footprint_of(const at::Tensor& parameter, std::size_t index) {
  const auto* begin = static_cast<const char*>(parameter.data_ptr());
  return {begin, begin + spanned_nbytes(parameter), index, !parameter.is_non_overlapping_and_dense()};
}

// The bytes of `parameter` in `bytes`, which stand for the memory from `begin` on.
at::Tensor bytes_of(const at::Tensor& parameter, const at::Tensor& bytes, const char* begin) {
  const std::int64_t width = parameter.element_size();
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  std::vector<std::int64_t> strides = parameter.strides().vec();
  for (std::int64_t& stride : strides) {
    stride *= width;
  }
  sizes.push_back(width);
  strides.push_back(1);
  return bytes.as_strided(sizes, strides, static_cast<const char*>(parameter.data_ptr()) - begin);
}

// Of two footprints of which the second begins inside of the first.
bool share_memory(const Footprint& first, const at::Tensor& one, const Footprint& second, const at::Tensor& other) {
  if (!first.has_gaps && !second.has_gaps) {
    return true;
  }
  const at::Tensor bytes = at::zeros({std::max(first.end, second.end) - first.begin}, at::kByte);
  bytes_of(one, bytes, first.begin).fill_(1);
  return bytes_of(other, bytes, first.begin).any().item<bool>();
}

}  // namespace

void EngineCore::check_inputs(const EngineInputs& inputs) const {
  PANNIER_CHECK(inputs.names.size() == inputs.parameters.size() && inputs.group_of.size() == inputs.names.size(),
                "names, parameters and groups differ in number");
  PANNIER_CHECK(inputs.shares.empty() || inputs.shares.size() == inputs.names.size(), "shares differ in number");
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
    if (!is_trained(inputs, i)) {
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

// What must be the same on every rank at a step, a line a thing, so that the first difference says what it is.
// Of edited parameters the bits are: each rank would go on with its own.
std::string EngineCore::common_text(const std::vector<kernels::Hyperparameters>& groups) {
  std::map<int, std::int64_t> bits = edited_bits_;
  for (const int parameter : edited_) {
    if (parts_->parameters->has_memory(parts_->model_layout->bucket_of(parameter))) {
      bits[parameter] = bits_of({parameter}).front();
    }
  }
  std::string text;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& g = groups[i];
    text += fmt::format(
        "group {}: lr {}, betas [{}, {}], eps {}, weight_decay {}, momentum {}, dampening {}, lr_decay {}"
        "{}{}\n",
        i, g.lr, g.beta1, g.beta2, g.eps, g.weight_decay, g.momentum, g.dampening, g.lr_decay,
        g.nesterov ? ", nesterov" : "", g.bias_correction ? "" : ", no bias correction");
  }
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const int index = static_cast<int>(i);
    text += fmt::format(
        "{}: {} updates{}{}\n", parts_->parameters->name(index), steps_[i], edited_.contains(index) ? ", edited" : "",
        bits.contains(index) ? fmt::format(" to values {:016x}", static_cast<std::uint64_t>(bits[index])) : "");
  }
  return text;
}

// Each rank would keep its own piece of what it was given.
void EngineCore::require_same(const at::Tensor& value, const std::string& what) {
  if (communicator_->world_size() == 1) {
    return;
  }
  const at::Tensor mine = value.detach().contiguous();
  const at::Tensor first = mine.clone();
  communicator_->broadcast(first, 0);
  std::int64_t differs = at::equal(first.view({-1}).view(at::kByte), mine.view({-1}).view(at::kByte)) ? 0 : 1;
  communicator_->sum({&differs, 1});
  if (differs > 0) {
    throw ConfigError(
        fmt::format("{} was given values that differ from rank 0's on {} of {} ranks; nothing was changed", what,
                    differs, communicator_->world_size()));
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
  Config common = config_;
  common.zero.optimizer_nvme_paths.clear();  // Each machine has its own disks.
  common.zero.param_nvme_paths.clear();
  common.pannier.threads = 0;  // And its own cores.
  common.pannier.trace_file.reset();
  common.steps_per_print.reset();  // What reports, which one rank may be to do for all.
  common.wall_clock_breakdown = common.memory_breakdown = common.dump_state = false;
  communicator_->agree("configuration", common.to_json());
  communicator_->agree("parameters", parameters);
  communicator_->agree("parameter groups", common_text(inputs.groups));
}

void EngineCore::require_whole_nodes(int node_size) const {
  if (node_size > 0 && communicator_->world_size() % node_size != 0) {
    throw ConfigError(fmt::format(
        "zero_optimization.zero_hpz_partition_size: {} ranks make no whole nodes of {}; it is the number of "
        "ranks on each machine",
        communicator_->world_size(), node_size));
  }
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
  const c10::NoGradGuard no_grad;
  std::vector<Footprint> footprints;
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    if (inputs.parameters[i].numel() > 0 && !inputs.is_shared_out(i)) {
      footprints.push_back(footprint_of(inputs.parameters[i], i));
    }
  }
  std::sort(footprints.begin(), footprints.end(),
            [](const Footprint& a, const Footprint& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < footprints.size(); ++i) {
    for (std::size_t j = i + 1; j < footprints.size() && footprints[j].begin < footprints[i].end; ++j) {
      const auto [first, second] = std::pair(footprints[i].index, footprints[j].index);
      if (share_memory(footprints[i], inputs.parameters[first], footprints[j], inputs.parameters[second])) {
        throw ConfigError(fmt::format(
            "parameters {} and {} share memory but are two parameters, so they would be trained apart; tie them "
            "by using one Parameter object for both",
            inputs.names[first], inputs.names[second]));
      }
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

}  // namespace pannier
