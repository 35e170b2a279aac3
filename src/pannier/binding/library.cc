// Registers what Python reaches as torch.classes.pannier and torch.ops.pannier.
#include <fmt/ranges.h>
#include <torch/library.h>

#include "pannier/binding/checkpoint.h"
#include "pannier/binding/checkpoint_files.h"
#include "pannier/binding/classes.h"
#include "pannier/binding/comm_probe.h"
#include "pannier/binding/plain_update.h"
#include "pannier/binding/update_bench.h"
#include "pannier/engine/metrics.h"
#include "pannier/hardware/host_report.h"
#include "pannier/plan/state_estimates.h"
#include "pannier/tier/refusing_storage.h"

namespace pannier::binding {
namespace {

using Self = c10::intrusive_ptr<EngineHolder>;

c10::Dict<std::string, std::int64_t> counters(const EngineCore& core) {
  c10::Dict<std::string, std::int64_t> result;
  result.insert("global_steps", core.counters().global_steps);
  result.insert("micro_steps", core.counters().micro_steps);
  result.insert("skipped_steps", core.counters().skipped_steps);
  result.insert("global_samples", core.counters().global_samples);
  return result;
}

std::string host_report_text() {
  std::string text;
  for (const auto& line : report(probe_host())) {
    text += fmt::format("{:<24} {}{}{}\n", line.name, line.value, line.advice.empty() ? "" : "   <- ", line.advice);
  }
  return text;
}

Numbers scaler_state(const LossScalerState& state) {
  Numbers result;
  result.insert("scale", state.scale);
  result.insert("iteration", static_cast<double>(state.iteration));
  result.insert("last_overflow_iteration", static_cast<double>(state.last_overflow_iteration));
  result.insert("hysteresis_left", state.hysteresis_left);
  result.insert("skipped_in_a_row", static_cast<double>(state.skipped_in_a_row));
  return result;
}

LossScalerState to_scaler_state(const Numbers& numbers) {
  const auto read = [&numbers](const char* key) {
    if (!numbers.contains(key)) {
      throw ConfigError(fmt::format("the loss scaler's state has no '{}'", key));
    }
    return numbers.at(key);
  };
  return {.scale = read("scale"),
          .iteration = static_cast<std::int64_t>(read("iteration")),
          .last_overflow_iteration = static_cast<std::int64_t>(read("last_overflow_iteration")),
          .hysteresis_left = static_cast<int>(read("hysteresis_left")),
          .skipped_in_a_row = static_cast<std::int64_t>(read("skipped_in_a_row"))};
}

// One rank: with more, the train batch also counts the others' micro-batches.
void set_batch(EngineCore& core, std::int64_t micro, std::int64_t steps) {
  if (micro < 1 || steps < 1) {
    throw ConfigError(
        fmt::format("micro batch size and accumulation steps must be positive, got {} and {}", micro, steps));
  }
  core.set_batch({.train = micro * steps, .micro = micro, .accumulation = steps, .complete = true});
}

std::vector<double> flattened(const std::vector<std::pair<double, double>>& momenta) {
  std::vector<double> flat;
  for (const auto& [first, second] : momenta) {
    flat.insert(flat.end(), {first, second});
  }
  return flat;
}

void define_engine(torch::Library& library) {
  using List = const c10::List<Numbers>&;
  auto engine = library.class_<EngineHolder>("Engine");
  define_checkpoint(engine);
  engine
      .def(torch::init<const c10::intrusive_ptr<ConfigHolder>&, std::string, std::vector<std::string>,
                       std::vector<at::Tensor>, std::vector<std::int64_t>, c10::List<Numbers>, std::vector<at::Tensor>,
                       std::string, std::vector<std::vector<std::int64_t>>, std::vector<at::Tensor>,
                       std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>>())
      .def("tick_forward",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.tick_forward(static_cast<int>(unit)); });
           })
      .def("wire_bytes",
           [](const Self& self) {
             const WireBytes bytes = self->core.communicator().wire_bytes();
             return std::vector<std::int64_t>{
                 bytes.payload_of(OperationKind::kGradients),    bytes.payload_of(OperationKind::kParameters),
                 bytes.payload_of(OperationKind::kBetweenNodes), bytes.payload_of(OperationKind::kVotes),
                 bytes.payload_of(OperationKind::kOther),        bytes.total()};
           })
      .def("wants_ticks", [](const Self& self) { return self->core.wants_ticks(); })
      .def("set_units",
           [](const Self& self, const std::vector<std::vector<std::int64_t>>& parameters_of) {
             translated([&] { self->core.set_units(parameters_of); });
           })
      .def("wait_for_unit",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.wait_for_unit(static_cast<int>(unit)); });
           })
      .def("wait_for_parameters", [](const Self& self) { translated([&] { self->core.wait_for_parameters(); }); })
      .def("partitions", [](const Self& self) { return self->core.gatherer() != nullptr; })
      .def("begin_unit_forward",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.gatherer()->begin_forward(static_cast<int>(unit)); });
           })
      .def("end_unit_forward",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.gatherer()->end_forward(static_cast<int>(unit)); });
           })
      .def("begin_unit_backward",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.begin_unit_backward(static_cast<int>(unit)); });
           })
      .def("end_unit_backward",
           [](const Self& self, std::int64_t unit) {
             translated([&] { self->core.end_unit_backward(static_cast<int>(unit)); });
           })
      .def("use_parameter",
           [](const Self& self, std::int64_t parameter) { translated([&] { self->core.use(parameter); }); })
      .def("hold", [](const Self& self, const std::vector<std::int64_t>& parameters,
                      bool watches) { translated([&] { self->core.hold(parameters, watches); }); })
      .def("let_go",
           [](const Self& self, const std::vector<std::int64_t>& parameters, std::int64_t modifier) {
             translated([&] {
               self->core.let_go(parameters, modifier < 0 ? std::nullopt : std::optional(static_cast<int>(modifier)));
             });
           })
      .def("overlaps", [](const Self& self) { return self->core.overlaps(); })
      .def("begin_backward",
           [](const Self& self, const at::Tensor& loss, bool scale_wrt_gas) {
             return translated([&] {
               auto [reported, scaled] = self->core.begin_backward(loss, scale_wrt_gas);
               return std::vector<at::Tensor>{reported, scaled};
             });
           })
      .def("end_backward", [](const Self& self) { translated([&] { self->core.end_backward(); }); })
      .def("abort_backward",
           [](const Self& self, const std::string& why) { translated([&] { self->core.abort_backward(why); }); })
      .def("check_ranks", [](const Self& self) { translated([&] { self->core.check_ranks(); }); })
      .def("scale",
           [](const Self& self, const at::Tensor& loss) { return translated([&] { return self->core.scale(loss); }); })
      .def("step",
           [](const Self& self, List groups) {
             return translated([&] { return static_cast<std::int64_t>(self->core.step(to_hyperparameters(groups))); });
           })
      .def("pending_micro_batches", [](const Self& self) { return self->core.pending_micro_batches(); })
      .def("is_boundary", [](const Self& self) { return self->core.is_boundary(); })
      .def("hold_gradients", [](const Self& self, bool holding) { self->core.hold_gradients(holding); })
      .def("set_boundary",
           [](const Self& self, std::int64_t value) {
             self->core.set_boundary(value < 0 ? std::nullopt : std::optional<bool>(value != 0));
           })
      .def("set_batch", [](const Self& self, std::int64_t micro,
                           std::int64_t steps) { translated([&] { set_batch(self->core, micro, steps); }); })
      .def("counters", [](const Self& self) { return counters(self->core); })
      .def("grad_norm", [](const Self& self) { return self->core.grad_norm(); })
      .def("loss_scale", [](const Self& self) { return self->core.loss_scaler().scale(); })
      .def("overflow", [](const Self& self) { return self->core.overflow(); })
      .def("scaler_state", [](const Self& self) { return scaler_state(self->core.loss_scaler().state()); })
      .def("load_scaler_state",
           [](const Self& self, const Numbers& state) {
             translated([&] { self->core.loss_scaler().load_state(to_scaler_state(state)); });
           })
      .def("memory_stats", [](const Self& self) { return memory_stats_json(self->core); })
      .def("plan", [](const Self& self) { return plan_json(self->core); })
      .def("start_timeline", [](const Self& self) { self->core.device().start_timeline(); })
      .def("timeline", [](const Self& self) { return timeline_json(self->core.device().take_timeline()); })
      .def("reset_peak", [](const Self& self) { self->core.reset_peaks(); })
      .def("state_tensor",
           [](const Self& self, std::int64_t parameter, const std::string& key) {
             return translated([&] { return self->core.state(static_cast<int>(parameter), key); });
           })
      .def("set_state_tensor",
           [](const Self& self, std::int64_t parameter, const std::string& key, const at::Tensor& value) {
             translated([&] { self->core.set_state(static_cast<int>(parameter), key, value); });
           })
      .def("grad_tensor",
           [](const Self& self, std::int64_t parameter) {
             return translated([&] { return self->core.gradient(static_cast<int>(parameter)); });
           })
      .def("set_grad_tensor",
           [](const Self& self, std::int64_t parameter, const at::Tensor& value) {
             translated([&] { self->core.set_gradient(static_cast<int>(parameter), value); });
           })
      .def("state_keys", [](const Self& self) { return translated([&] { return self->core.state_names(); }); })
      .def("param_step",
           [](const Self& self, std::int64_t parameter) {
             return translated([&] { return self->core.parameter_step(static_cast<int>(parameter)); });
           })
      .def("set_param_step",
           [](const Self& self, std::int64_t parameter, std::int64_t step) {
             translated([&] { self->core.parameter_step(static_cast<int>(parameter)) = step; });
           })
      .def("parameters_changed", [](const Self& self) { translated([&] { self->core.parameters_changed(); }); })
      .def("synchronize", [](const Self& self) { translated([&] { self->core.synchronize(); }); })
      .def("drop_gradients", [](const Self& self) { translated([&] { self->core.drop_gradients(); }); })
      .def("close", [](const Self& self) { self->core.close(); })
      .def("close_and_hand_over", [](const Self& self) {
        return translated([&] {
          std::vector<std::tuple<std::int64_t, std::int64_t, at::Tensor>> left;
          for (HandedOver& each : self->core.close_and_hand_over()) {
            left.emplace_back(each.parameter, each.begin, std::move(each.values));
          }
          return left;
        });
      });
}

}  // namespace
}  // namespace pannier::binding

TORCH_LIBRARY(pannier, library) {
  using namespace pannier;
  using namespace pannier::binding;
  library.class_<ConfigHolder>("Config")
      .def(torch::init<std::string>())
      .def("notes", &ConfigHolder::notes)
      .def("json", &ConfigHolder::json)
      .def("resolve_batch", &ConfigHolder::resolve_batch)
      .def("require_resolved", &ConfigHolder::require_resolved);
  library.class_<ScheduleHolder>("Schedule")
      .def(torch::init<std::string, std::string, std::vector<double>>())
      .def("step", [](const c10::intrusive_ptr<ScheduleHolder>& self) { self->schedule.step(); })
      .def("step_to", [](const c10::intrusive_ptr<ScheduleHolder>& self,
                         std::int64_t iteration) { translated([&] { self->schedule.step_to(iteration); }); })
      .def("lrs", [](const c10::intrusive_ptr<ScheduleHolder>& self) { return self->schedule.lrs(); })
      .def("momenta",
           [](const c10::intrusive_ptr<ScheduleHolder>& self) { return flattened(self->schedule.momenta()); })
      .def("cycle_momenta",
           [](const c10::intrusive_ptr<ScheduleHolder>& self) { return flattened(self->schedule.cycle_momenta()); })
      .def("iteration", [](const c10::intrusive_ptr<ScheduleHolder>& self) { return self->schedule.last_iteration(); });
  define_engine(library);
  define_comm_probe(library);
  define_checkpoint_files(library);
  library.class_<UpdateBench>("UpdateBench")
      .def(torch::init<std::string, at::Tensor, at::Tensor>())
      .def("step", &UpdateBench::step)
      .def("weights", &UpdateBench::weights)
      .def("arrays", &UpdateBench::arrays);
  library.def(
      "update_tensor(str rule, Tensor(a!) weight, Tensor grad, Tensor(b!) state1, Tensor(c!) state2, int step, "
      "Dict(str, float) numbers) -> ()",
      [](const std::string& rule, const at::Tensor& weight, const at::Tensor& grad, const at::Tensor& state1,
         const at::Tensor& state2, std::int64_t step, const Numbers& numbers) {
        translated([&] { update_tensor(rule, weight, grad, state1, state2, step, numbers); });
      });
  library.def("take_memory(Tensor tensor, str message) -> ()", take_memory);
  library.def("host_report() -> str", [] { return host_report_text(); });
  library.def("add_device_memory_cap(int nbytes) -> ()", [](std::int64_t nbytes) {
    translated([&] { MemoryMeter::install().ledger().add_cap(static_cast<std::size_t>(nbytes)); });
  });
  library.def("remove_device_memory_cap(int nbytes) -> ()", [](std::int64_t nbytes) {
    MemoryMeter::install().ledger().remove_cap(static_cast<std::size_t>(nbytes));
  });
  library.def(
      "estimate_states(int stage, int numel, int largest, int gpus, int nodes, bool optimizer, bool params, bool "
      "shards, float factor)"
      " -> (float, float)",
      [](std::int64_t stage, std::int64_t numel, std::int64_t largest, std::int64_t gpus, std::int64_t nodes,
         bool optimizer, bool params, bool shards, double factor) {
        return translated([&] {
          const StateEstimateInput input{
              numel, largest, static_cast<int>(gpus), static_cast<int>(nodes), optimizer, params, shards, factor};
          const auto estimate = stage == 3 ? estimate_stage_3(input) : estimate_stage_2(input);
          return std::make_tuple(estimate.host_bytes, estimate.device_bytes);
        });
      });
  library.def("device_memory() -> str", [] { return device_memory_json(MemoryMeter::install().ledger().memory()); });
  library.def("reset_device_peak() -> ()", [] { MemoryMeter::install().ledger().reset_peak(); });
  // From here on torch's CPU memory is counted.
  MemoryMeter::install();
}
