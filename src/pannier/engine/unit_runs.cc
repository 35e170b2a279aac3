#include "pannier/engine/unit_runs.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "pannier/base/error.h"
#include "pannier/engine/engine_core.h"
#include "pannier/zero/parameter_gatherer.h"

namespace pannier {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

struct UnitOf {
  std::weak_ptr<EngineCore*> owner;
  int unit = 0;
};

// Process-wide by nature: a module is some engine's unit or nobody's.
struct KnownUnits {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, UnitOf> of;
};

KnownUnits& known_units() {
  static auto* const known = new KnownUnits;  // Outlives whatever static destructors still run.
  return *known;
}

class CallsBefore final : public torch::autograd::FunctionPreHook {
 public:
  explicit CallsBefore(std::function<void()> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override {
    call_();
    return gradients;
  }

 private:
  std::function<void()> call_;
};

// One run of a unit, as its backward will see it.
class Backward : public std::enable_shared_from_this<Backward> {
 public:
  Backward(std::weak_ptr<EngineCore*> owner, int unit) : owner_(std::move(owner)), unit_(unit) {}

  void begin() {
    if (const auto owner = owner_.lock(); owner != nullptr && !(*owner)->closed() && !is_open_) {
      is_open_ = true;
      (*owner)->begin_unit_backward(unit_);
    }
  }
  // A backward that builds a graph of its own leaves nodes that read parameters too, and nothing says when they have
  // run: they stay whole until the engine's next backward ends.
  void begin_at_node() {
    if (!c10::GradMode::is_enabled()) {
      begin();
    } else if (const auto owner = owner_.lock(); owner != nullptr && !(*owner)->closed() && !is_open_) {
      (*owner)->begin_unit_backward(unit_);
    }
  }
  // No node of its backward is left that could read a parameter.
  void end() {
    if (const auto owner = owner_.lock(); owner != nullptr && !(*owner)->closed() && is_open_) {
      is_open_ = false;
      (*owner)->end_unit_backward(unit_);
    }
  }

  // Autograd runs nodes that were made later first, so when the node that made one of its inputs runs, none of its own
  // is left. The end of one that was given leaves only, and so ran first, is the end of the whole backward.
  void watch(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) {
    const auto self = shared_from_this();
    for (Node* const node : nodes_of(returned)) {
      node->add_pre_hook(std::make_unique<CallsBefore>([self] { self->begin_at_node(); }));
    }
    for (Node* const node : nodes_of(given)) {
      node->add_pre_hook(std::make_unique<CallsBefore>([self] { self->end(); }));
    }
  }

 private:
  static std::unordered_set<Node*> nodes_of(const std::vector<at::Tensor>& tensors) {
    std::unordered_set<Node*> nodes;
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.grad_fn() != nullptr) {
        nodes.insert(tensor.grad_fn().get());
      }
    }
    return nodes;
  }

  std::weak_ptr<EngineCore*> owner_;
  int unit_;
  bool is_open_ = false;
};

void mark_read(const torch::nn::Module& module, const std::unordered_set<const torch::nn::Module*>& units,
               const std::unordered_map<const c10::TensorImpl*, std::int64_t>& index_of,
               std::vector<std::int64_t>& read) {
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
    if (const auto found = index_of.find(parameter.unsafeGetTensorImpl()); found != index_of.end()) {
      read.push_back(found->second);
    }
  }
  for (const auto& child : module.children()) {
    if (!units.contains(child.get())) {
      mark_read(*child, units, index_of, read);
    }
  }
}

void require_units(const torch::nn::Module& model, const std::vector<const torch::nn::Module*>& units) {
  std::unordered_set<const torch::nn::Module*> parts;
  for (const auto& part : model.modules(/*include_self=*/false)) {
    parts.insert(part.get());
  }
  std::unordered_set<const torch::nn::Module*> seen;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i] == nullptr) {
      throw ConfigError(fmt::format("units[{}] is null; a part of the model was expected", i));
    }
    const char* const what = units[i] == &model              ? "is the model itself, which is unit 0 anyway"
                             : !parts.contains(units[i])     ? "is not a part of the model"
                             : !seen.insert(units[i]).second ? "is there twice"
                                                             : nullptr;
    if (what != nullptr) {
      throw ConfigError(fmt::format("units[{}], of type {}, {}", i, units[i]->name(), what));
    }
  }
}

}  // namespace

std::vector<std::vector<std::int64_t>> parameters_of_units(const torch::nn::Module& model,
                                                           const std::vector<const torch::nn::Module*>& units,
                                                           const std::vector<at::Tensor>& parameters) {
  require_units(model, units);
  std::unordered_map<const c10::TensorImpl*, std::int64_t> index_of;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    index_of.emplace(parameters[i].unsafeGetTensorImpl(), static_cast<std::int64_t>(i));
  }
  const std::unordered_set<const torch::nn::Module*> known(units.begin(), units.end());
  std::vector<std::vector<std::int64_t>> read(units.size() + 1);
  std::unordered_set<std::int64_t> in_units;
  for (std::size_t i = 0; i < units.size(); ++i) {
    std::vector<std::int64_t>& of_unit = read[i + 1];
    mark_read(*units[i], known, index_of, of_unit);
    std::ranges::sort(of_unit);
    of_unit.erase(std::ranges::unique(of_unit).begin(), of_unit.end());
    in_units.insert(of_unit.begin(), of_unit.end());
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(parameters.size()); ++i) {
    if (!in_units.contains(i)) {
      read[0].push_back(i);
    }
  }
  return read;
}

UnitTable::UnitTable(EngineCore& core, const torch::nn::Module& model,
                     const std::vector<const torch::nn::Module*>& units)
    : owner_(std::make_shared<EngineCore*>(&core)), modules_{&model} {
  modules_.insert(modules_.end(), units.begin(), units.end());
  KnownUnits& known = known_units();
  const std::lock_guard lock(known.mutex);
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    known.of[modules_[i]] = {owner_, static_cast<int>(i)};
  }
}

UnitTable::~UnitTable() {
  KnownUnits& known = known_units();
  const std::lock_guard lock(known.mutex);
  for (const auto* module : modules_) {
    if (const auto found = known.of.find(module); found != known.of.end() && found->second.owner.lock() == owner_) {
      known.of.erase(found);
    }
  }
}

namespace detail {

UnitRun::UnitRun(const torch::nn::Module& module) {
  {
    KnownUnits& known = known_units();
    const std::lock_guard lock(known.mutex);
    const auto found = known.of.find(&module);
    if (found == known.of.end()) {
      return;
    }
    owner_ = found->second.owner.lock();
    unit_ = found->second.unit;
  }
  if (owner_ == nullptr || (*owner_)->closed()) {
    return;
  }
  (*owner_)->tick_forward(unit_);
  if (auto* const gatherer = (*owner_)->gatherer(); gatherer != nullptr) {
    gatherer->begin_forward(unit_);
    is_open_ = true;
  }
}

UnitRun::~UnitRun() {
  if (is_open_) {
    try {
      (*owner_)->gatherer()->end_forward(unit_);
    } catch (...) {  // Forward's own error is on its way.
    }
  }
}

void UnitRun::end(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned) {
  if (!is_open_) {
    return;
  }
  const bool has_graph = std::ranges::any_of(
      returned, [](const at::Tensor& tensor) { return tensor.defined() && tensor.grad_fn() != nullptr; });
  if (c10::GradMode::is_enabled() && has_graph) {
    const auto backward = std::make_shared<Backward>(owner_, unit_);
    backward->watch(given, returned);
    if (torch::autograd::get_current_graph_task_id() != -1) {
      backward->begin();  // A recomputation: its backward follows at once.
    }
  }
  is_open_ = false;
  (*owner_)->gatherer()->end_forward(unit_);
}

}  // namespace detail
}  // namespace pannier
