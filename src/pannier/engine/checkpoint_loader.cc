#include "pannier/engine/checkpoint_loader.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/ckpt/share.h"
#include "pannier/engine/checkpoint_buffers.h"
#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/frozen_pieces.h"
#include "pannier/engine/random_states.h"
#include "pannier/engine/shared_outcome.h"
#include "pannier/engine/state_loading.h"
#include "pannier/engine/stored_values.h"

namespace pannier {
namespace {

constexpr std::size_t kMostNames = 8;
constexpr std::size_t kPartNbytes = std::size_t{1} << 20;

std::string some_of(const std::vector<std::string>& names) {
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kMostNames)));
  return fmt::format("{}{}", fmt::join(first, ", "),
                     names.size() > kMostNames ? fmt::format(" and {} more", names.size() - kMostNames) : "");
}

}  // namespace

std::string CheckpointLoader::tag_of(const LoadRequest& request) const {
  if (!request.tag.empty()) {
    return request.tag;
  }
  return ckpt::CheckpointFolder(request.folder).latest().value_or("");
}

std::optional<LoadedCheckpoint> CheckpointLoader::open(const LoadRequest& request) {
  LoadedCheckpoint loaded;
  const std::vector<std::string> seen = done_by_all(ranks_, "the names of a checkpoint", [&] {
    const std::string tag = tag_of(request);
    if (tag.empty()) {
      return std::string();
    }
    reader_ = std::make_unique<ckpt::CheckpointReader>(ckpt::SealedFolder(request.folder).folder(tag));
    loaded.path = reader_->path();
    loaded.attributes = reader_->manifest().attributes;
    loaded.world_size = reader_->manifest().world_size;
    compare_names(request, loaded);
    compare_schedules(request);
    if (wants_states(request)) {
      compare_optimizers();
      compare_groups(request);
      compare_states(request, loaded);
    }
    return fmt::format("tag '{}' of step {} with {} tensors in {} files", tag, reader_->manifest().step,
                       reader_->manifest().tensors.size(), reader_->manifest().files.size());
  });
  for (std::size_t rank = 1; rank < seen.size(); ++rank) {
    if (seen[rank] != seen[0]) {
      throw ConfigError(fmt::format("load_checkpoint('{}'): rank {} sees {}, rank 0 {}", request.folder, rank,
                                    seen[rank].empty() ? "no latest" : seen[rank],
                                    seen[0].empty() ? "no latest" : seen[0]));
    }
  }
  return reader_ == nullptr ? std::nullopt : std::optional(std::move(loaded));
}

bool CheckpointLoader::wants_states(const LoadRequest& request) const {
  return parts_ != nullptr && request.optimizer_states && !request.module_only;
}

// A tied tensor is stored under one of its names.
std::string CheckpointLoader::stored_name(const std::string& name) const {
  return reader_->find(model_tensor(name)) != nullptr ? name : reader_->attribute("alias." + name, name);
}

void CheckpointLoader::compare_names(const LoadRequest& request, LoadedCheckpoint& loaded) {
  std::set<std::string> used;
  const auto look_for = [&](const std::string& name) {
    const std::string tensor = model_tensor(stored_name(name));
    if (reader_->find(tensor) == nullptr) {
      loaded.missing.push_back(name);
      return false;
    }
    used.insert(tensor);
    return true;
  };
  for (int i = 0; parts_ != nullptr && i < parts_->layout->num_parameters(); ++i) {
    if (const std::string& name = parts_->parameters->name(i); look_for(name) && request.parameters) {
      require_shape(model_tensor(stored_name(name)), stored_name(name), i);
    }
  }
  for (const int i : partitioned_of(parts_, request.frozen)) {
    const std::string name = stored_name(parts_->parameters->name(i));
    if (reader_->find(model_tensor(name)) != nullptr) {
      require_shape(model_tensor(name), name, i);
    }
  }
  const bool expects_frozen = reader_->attribute("excludes_frozen").empty();
  for (const auto& named : request.frozen) {
    if (!look_for(named.name) && !expects_frozen) {
      loaded.missing.pop_back();
    }
  }
  for (const auto& named : request.buffers) {
    (void)look_for(named.name);
  }
  for (const auto& tensor : reader_->manifest().tensors) {
    if (tensor.name.starts_with(kModelPrefix) && !used.contains(tensor.name)) {
      loaded.unexpected.push_back(tensor.name.substr(std::string_view(kModelPrefix).size()));
    }
  }
  if (request.strict && !(loaded.missing.empty() && loaded.unexpected.empty())) {
    throw ConfigError(fmt::format(
        "'{}' is of another model:{}{}; load_module_strict=False loads what both have", reader_->path(),
        loaded.missing.empty() ? "" : fmt::format(" it has no {}", some_of(loaded.missing)),
        loaded.unexpected.empty()
            ? ""
            : fmt::format("{} this model has no {}", loaded.missing.empty() ? "" : ";", some_of(loaded.unexpected))));
  }
}

// Moments of one optimizer mean something else to another, also where they have the same names. Adam and AdamW differ
// in what they do with the weight decay alone.
void CheckpointLoader::compare_optimizers() const {
  const auto own_states = fmt::format("{}", fmt::join(parts_->pipeline->state_names(), ","));
  const std::string saved_states = reader_->attribute("optimizer.states", own_states);
  const std::string saved = reader_->attribute("optimizer", saved_states == own_states ? optimizer_ : "another");
  const auto is_adam = [](const std::string& name) { return name == "Adam" || name == "AdamW"; };
  const bool is_kin = saved == optimizer_ || (is_adam(saved) && is_adam(optimizer_));
  if (!is_kin || saved_states.size() > own_states.size()) {
    const auto described = [](const std::string& name, const std::string& states) {
      return fmt::format("{} ({})", name, states.empty() ? "none" : states);
    };
    throw ConfigError(fmt::format(
        "'{}' has the states of {}, and this engine's optimizer is {}; load_optimizer_states=False loads the rest",
        reader_->path(), described(saved, saved_states), described(optimizer_, own_states)));
  }
  if (saved != optimizer_ && ranks_.rank() == 0) {
    log::warning(fmt::format("load_checkpoint: '{}' was saved by {}, and goes on with {}: weight decay works otherwise",
                             reader_->path(), saved, optimizer_));
  }
}

void CheckpointLoader::compare_groups(const LoadRequest& request) const {
  const std::string saved = reader_->attribute("groups", "0");
  if (request.num_groups > 0 && saved != "0" && saved != fmt::format("{}", request.num_groups)) {
    throw ConfigError(fmt::format(
        "'{}' has {} parameter groups, and this engine's optimizer {}; load_optimizer_states=False loads the rest",
        reader_->path(), saved, request.num_groups));
  }
}

void CheckpointLoader::compare_schedules(const LoadRequest& request) const {
  const std::string saved = reader_->attribute("schedule.kind");
  const auto& known = request.schedules;
  if (!saved.empty() && !known.empty() && std::find(known.begin(), known.end(), saved) == known.end()) {
    throw ConfigError(fmt::format(
        "'{}' has the state of a {}, and this engine's schedule is a {}; load_lr_scheduler_states=False loads the rest",
        reader_->path(), saved, known.front()));
  }
}

void CheckpointLoader::compare_states(const LoadRequest& request, LoadedCheckpoint& loaded) {
  for (int i = 0; i < parts_->layout->num_parameters(); ++i) {
    const std::string name = stored_name(parts_->parameters->name(i));
    for (const auto& state : parts_->pipeline->state_names()) {
      const std::string tensor = state_tensor(state, name);
      if (reader_->find(tensor) == nullptr) {
        loaded.missing_states.push_back(fmt::format("{} of {}", state, parts_->parameters->name(i)));
      } else {
        require_shape(tensor, name, i);
      }
    }
  }
  if (request.strict && !loaded.missing_states.empty()) {
    throw ConfigError(
        fmt::format("'{}' has no {}, which this optimizer keeps; load_optimizer_states=False loads the rest, "
                    "load_module_strict=False starts what is missing anew",
                    reader_->path(), some_of(loaded.missing_states)));
  }
}

void CheckpointLoader::require_shape(const std::string& tensor, const std::string& name, int parameter) const {
  const at::Tensor& owner = parts_->parameters->parameter(parameter);
  (void)lies_as_stored(*reader_, tensor, reader_->attribute("order." + name), owner.sizes(),
                       memory_order(owner.sizes(), owner.strides()));
}

void CheckpointLoader::load(const LoadRequest& request, LoadedCheckpoint& loaded) {
  const c10::NoGradGuard no_grad;
  (void)done_by_all(ranks_, "the reading of a checkpoint", [&] {
    read_all(request);
    load_extras(request, loaded);
    return std::string();
  });
  if (parts_ != nullptr) {
    parts_->pipeline->publish_loaded();
  }
}

// Everything at once, so that the disk always has the next requests.
void CheckpointLoader::read_all(const LoadRequest& request) {
  std::optional<StateLoading> states;
  std::vector<ckpt::TensorRun> runs;
  if (parts_ != nullptr) {
    states.emplace(*reader_, *parts_, StateSelection{request.parameters, wants_states(request)});
    runs = states->runs();
  }
  const std::vector<int> partitioned = partitioned_of(parts_, request.frozen);
  std::optional<FrozenLoading> pieces;
  if (!partitioned.empty()) {
    pieces.emplace(device_, *reader_, *parts_, partitioned,
                   [this](const std::string& name) { return stored_name(name); });
    const auto more = pieces->runs();
    runs.insert(runs.end(), more.begin(), more.end());
  }
  const std::vector<NamedTensor> whole = whole_of(parts_, request.frozen);
  for (const auto* list : {&whole, &request.buffers}) {
    for (const auto& named : *list) {
      if (is_in_runs(named)) {
        runs.push_back({model_tensor(stored_name(named.name)), 0, named.tensor.numel()});
      }
    }
  }
  std::uint64_t nbytes = 0;
  for (const auto& run : runs) {
    nbytes += static_cast<std::uint64_t>(run.end - run.begin) * dtype_nbytes(reader_->find(run.tensor)->dtype);
  }
  HostMemory spare;
  const auto mover = make_mover(memory_, spare, ckpt::FileMoverOptions::for_files_of(nbytes));
  ckpt::VerifiedReads reads(*reader_, *mover, runs);
  if (states) {
    states->load(reads);
  }
  if (pieces) {
    pieces->load(reads);
  }
  for (const auto* list : {&whole, &request.buffers}) {
    for (const auto& named : *list) {
      if (is_in_runs(named)) {
        load_in_runs(named, reads);
      } else {
        load_tensor(named);
      }
    }
  }
}

// Whether bytes can go from the file to where the tensor is as they are.
bool CheckpointLoader::is_in_runs(const NamedTensor& named) const {
  const std::string name = stored_name(named.name);
  const ckpt::TensorInfo* info = reader_->find(model_tensor(name));
  return info != nullptr && named.tensor.is_contiguous() && torch_dtype(info->dtype) == named.tensor.scalar_type() &&
         at::IntArrayRef(info->shape) == named.tensor.sizes() && reader_->attribute("order." + name).empty();
}

void CheckpointLoader::load_in_runs(const NamedTensor& named, ckpt::VerifiedReads& reads) {
  const at::Tensor flat = at::Tensor(named.tensor).detach();
  std::vector<std::byte> part;
  for (std::size_t at = 0; at < flat.nbytes(); at += part.size()) {
    part.resize(std::min(kPartNbytes, flat.nbytes() - at));
    reads.read(part);
    bytes_from_host(device_, flat, at, part.data(), part.size());
  }
  if (flat.nbytes() > 0) {
    flat.unsafeGetTensorImpl()->bump_version();
  }
}

void CheckpointLoader::load_tensor(const NamedTensor& named) {
  const std::string name = stored_name(named.name);
  const std::string tensor = model_tensor(name);
  const ckpt::TensorInfo* info = reader_->find(tensor);
  if (info == nullptr) {
    return;
  }
  const auto order = order_from(reader_->attribute("order." + name), info->shape.size());
  const auto sizes = sizes_out_of_order(info->shape, order);
  if (at::IntArrayRef(sizes) != named.tensor.sizes()) {
    throw ConfigError(fmt::format("'{}': '{}' has shape {}, the model's has {}", reader_->path(), named.name, sizes,
                                  named.tensor.sizes().vec()));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(*info->checked_numel()) * dtype_nbytes(info->dtype));
  reader_->read(tensor, 0, bytes);
  std::vector<std::int64_t> dimension_in_file(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    dimension_in_file[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  const at::Tensor stored = at::from_blob(bytes.data(), info->shape, torch_dtype(info->dtype));
  at::Tensor(named.tensor).detach().copy_(stored.permute(dimension_in_file));
}

void CheckpointLoader::load_extras(const LoadRequest& request, LoadedCheckpoint& loaded) {
  const auto bytes_of = [](const ckpt::SafetensorsReader& extra) {
    NamedBytes bytes;
    for (const auto& entry : extra.entries()) {
      if (entry.info.name.starts_with(kBytesPrefix)) {
        bytes[entry.info.name.substr(std::string_view(kBytesPrefix).size())] = read_extra(extra, entry);
      }
    }
    return bytes;
  };
  if (const auto first = reader_->extra(0); first != nullptr) {
    loaded.common = bytes_of(*first);
  }
  // With another number of ranks there is no telling whose are whose.
  const auto own = loaded.world_size == ranks_.world_size() ? reader_->extra(ranks_.rank()) : nullptr;
  if (own == nullptr) {
    return;
  }
  loaded.own = bytes_of(*own);
  for (const auto& buffer : request.buffers) {
    if (const auto* entry = own->find(kBufferPrefix + buffer.name); entry != nullptr) {
      at::Tensor(buffer.tensor).copy_(read_extra(*own, *entry));
    }
  }
  if (!request.module_only) {
    restore_random_states(*own, device_.torch_device());
  }
}

}  // namespace pannier
