// Units of a model: parts that run one after the other, such as a transformer's blocks. A unit's parameters are whole
// while it runs, forward and backward, and need not be at any other time; so with stage 3 a device holds a few units of
// the model. Whoever writes the model says where one runs:
//
//   at::Tensor forward(at::Tensor x) {
//     for (const auto& block : blocks) { x = pannier::run_unit(block, x); }   // in place of block->forward(x)
//     return head(x);
//   }
//   ...
//   auto engine = pannier::initialize(model, config, {.units = blocks' modules});
//   auto loss = pannier::run_unit(model, x);                                  // the whole model is unit 0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace pannier {

class EngineCore;

/// Says to run_unit() which modules are the units of one engine, as long as it lives.
class UnitTable {
 public:
  /// `model` is unit 0, `units` are counted from 1. `core` must outlive it. An engine that had them before has no more.
  UnitTable(EngineCore& core, const torch::nn::Module& model, const std::vector<const torch::nn::Module*>& units);
  ~UnitTable();
  UnitTable(const UnitTable&) = delete;
  UnitTable& operator=(const UnitTable&) = delete;

 private:
  std::shared_ptr<EngineCore*> owner_;  ///< Lives as long as this does.
  std::vector<const torch::nn::Module*> modules_;
};

/// For each unit, counted from 1, the indices in `parameters` of what it reads, less what units below it do; before
/// them those of no unit. Throws ConfigError naming a unit that is null, given twice, the model itself, or not in the
/// model.
[[nodiscard]] std::vector<std::vector<std::int64_t>> parameters_of_units(
    const torch::nn::Module& model, const std::vector<const torch::nn::Module*>& units,
    const std::vector<at::Tensor>& parameters);

namespace detail {

// One run of a unit. From its beginning to its end the unit's parameters are whole.
class UnitRun {
 public:
  explicit UnitRun(const torch::nn::Module& module);
  ~UnitRun();  ///< Ends a run that threw.
  UnitRun(const UnitRun&) = delete;
  UnitRun& operator=(const UnitRun&) = delete;
  /// What the unit was given and returned, which says where its backward begins and ends.
  void end(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& returned);

 private:
  std::shared_ptr<EngineCore*> owner_;
  int unit_ = 0;
  bool is_open_ = false;
};

inline void collect(std::vector<at::Tensor>& tensors, const at::Tensor& tensor) { tensors.push_back(tensor); }
inline void collect(std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& more) {
  tensors.insert(tensors.end(), more.begin(), more.end());
}
template <class... Parts>
void collect(std::vector<at::Tensor>& tensors, const std::tuple<Parts...>& parts) {
  std::apply([&](const auto&... part) { (collect(tensors, part), ...); }, parts);
}
template <class Other>
void collect(std::vector<at::Tensor>& /*tensors*/, const Other& /*other*/) {}  // It holds no tensor.

}  // namespace detail

/// Calls `unit->forward(arguments...)` for a module holder or a pointer to a module, with the unit's parameters whole.
/// Tensors in it and in what it returns may be in tuples and vectors. A module that is no engine's unit just runs.
/// Throws what forward throws, CollectiveError and IoError.
template <class Unit, class... Arguments>
auto run_unit(Unit&& unit, Arguments&&... arguments) {
  detail::UnitRun run(*unit);
  std::vector<at::Tensor> given;
  (detail::collect(given, arguments), ...);
  auto result = unit->forward(std::forward<Arguments>(arguments)...);
  std::vector<at::Tensor> returned;
  detail::collect(returned, result);
  run.end(given, returned);
  return result;
}

}  // namespace pannier
