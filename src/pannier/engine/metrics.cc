#include "pannier/engine/metrics.h"

#include <nlohmann/json.hpp>

#include "pannier/base/units.h"

namespace pannier {
namespace {

using Json = nlohmann::ordered_json;

Json device_json(const DeviceMemory& memory) {
  Json owners = Json::object();
  for (std::size_t i = 0; i < kNumOwners; ++i) {
    owners[to_string(static_cast<Owner>(i))] = {{"current", memory.current_by_owner[i]},
                                                {"peak", memory.peak_by_owner[i]}};
  }
  return {{"current", memory.current}, {"peak", memory.peak}, {"cap", memory.cap}, {"by_owner", owners}};
}

Json usage_json(const HostUsage& usage) { return {{"current", usage.current_bytes}, {"peak", usage.peak_bytes}}; }

}  // namespace

std::string device_memory_json(const DeviceMemory& memory) { return device_json(memory).dump(); }

std::string memory_stats_json(EngineCore& engine) {
  const HostMemoryStats host = engine.host_memory().stats();
  Json host_json = usage_json(host.total);
  host_json["by_owner"] = Json::object();
  for (const auto& [owner, usage] : host.by_owner) {
    host_json["by_owner"][owner] = usage_json(usage);
  }
  const Json nothing = {{"current", 0}, {"peak", 0}, {"by_owner", Json::object()}};
  return Json{{"device", device_json(engine.device().memory())}, {"host", host_json}, {"nvme", nothing}}.dump();
}

std::string plan_json(EngineCore& engine) {
  const MemoryPlan& plan = engine.plan();
  std::string text = format_plan(plan, engine.optimizer_home());
  if (const std::string unknown = "measured after step 1"; engine.counters().global_steps > 0) {
    const auto activations = engine.device().memory().peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
    text.replace(text.find(unknown), unknown.size(), "peak " + format_bytes(activations) + ", measured");
  }
  return Json{{"stage", engine.config().zero.stage},
              {"optimizer_home", to_string(engine.optimizer_home())},
              {"device",
               {{"parameters", plan.device_parameters},
                {"gradients", plan.device_gradients},
                {"optimizer states", plan.device_optimizer_states},
                {"total", plan.device()}}},
              {"host",
               {{"parameters", 0},
                {"gradients", plan.host_gradients},
                {"optimizer states", plan.host_optimizer_states},
                {"total", plan.host()}}},
              {"text", text}}
      .dump();
}

std::string timeline_json(const std::vector<MemorySample>& samples) {
  Json rows = Json::array();
  for (const auto& sample : samples) {
    Json owners = Json::object();
    for (std::size_t i = 0; i < kNumOwners; ++i) {
      owners[to_string(static_cast<Owner>(i))] = sample.by_owner[i];
    }
    rows.push_back(Json::array({sample.seconds, owners}));
  }
  return rows.dump();
}

}  // namespace pannier
