#include "pannier/engine/metrics.h"

#include <nlohmann/json.hpp>

#include "pannier/plan/plan_table.h"

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

// Files are as large as they will ever be from the start on.
Json nvme_json(const NvmeUse& nvme) {
  const auto file_json = [](std::size_t nbytes) { return Json{{"current", nbytes}, {"peak", nbytes}}; };
  Json json = file_json(nvme.states.file_nbytes + nvme.parameters.file_nbytes);
  json["by_owner"] = Json::object();
  if (nvme.states.file_nbytes > 0) {
    json["by_owner"]["optimizer states"] = file_json(nvme.states.file_nbytes);
  }
  if (nvme.parameters.file_nbytes > 0) {
    json["by_owner"]["parameters"] = file_json(nvme.parameters.file_nbytes);
  }
  json["read"] = nvme.states.read_nbytes + nvme.parameters.read_nbytes;
  json["written"] = nvme.states.written_nbytes + nvme.parameters.written_nbytes;
  return json;
}

}  // namespace

std::string device_memory_json(const DeviceMemory& memory) { return device_json(memory).dump(); }

std::string memory_stats_json(EngineCore& engine) {
  const HostMemoryStats host = engine.host_memory().stats();
  Json host_json = usage_json(host.total);
  host_json["by_owner"] = Json::object();
  for (const auto& [owner, usage] : host.by_owner) {
    host_json["by_owner"][owner] = usage_json(usage);
  }
  const CheckpointStats checkpoint = engine.checkpoint_stats();
  return Json{{"device", device_json(engine.device().memory())},
              {"host", host_json},
              {"nvme", nvme_json(engine.nvme())},
              {"checkpoint", {{"is_being_written", checkpoint.is_being_written}, {"waited_s", checkpoint.waited_s}}}}
      .dump();
}

namespace {

// The whole plan as it stands: what is not known yet, or does not apply, is left out.
PlanTable plan_table(EngineCore& engine) {
  PlanTable table{.memory = engine.plan(), .optimizer_home = engine.optimizer_home()};
  if (engine.counters().global_steps > 0) {
    table.activations_nbytes = engine.device().memory().peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
  }
  if (const RoutePlanner* planner = engine.route_planner()) {
    table.bucket_numels = planner->bucket_numels();
    table.routes = planner->routes();
    table.split = planner->split();
    table.observation = planner->observation();
    table.micro_batches = engine.batch().accumulation;
    table.rates = planner->rates();
    const RateOrigin origin = planner->origin();
    table.origins = {origin, origin, origin, origin};
  }
  return table;
}

Json split_json(const RoutePlanner& planner) {
  const SplitPlan& split = planner.split();
  return {{"streamed_share", planner.streamed_share()},
          {"predicted_step_s", split.predicted_step_s},
          {"exposed_s", split.exposed_s},
          {"binds", split.binds},
          {"forward_s", planner.observation().forward_s.value_or(0.0)},
          {"backward_s", planner.observation().backward_s.value_or(0.0)},
          {"slack", planner.slack_nbytes()},
          {"room", planner.room_nbytes()},
          {"up", planner.rates().up},
          {"down", planner.rates().down},
          {"up_both", planner.rates().up_both},
          {"dram", planner.rates().dram},
          {"host_update", planner.rates().host_update},
          {"down_beside_update", planner.rates().down_beside_update},
          {"to_peak_s", planner.observation().to_peak_s.value_or(0.0)}};
}

}  // namespace

std::string plan_json(EngineCore& engine) {
  const MemoryPlan& plan = engine.plan();
  const std::string text = format_plan_table(plan_table(engine));
  const RoutePlanner* planner = engine.route_planner();
  Json host{{"parameters", plan.host_parameters},
            {"gradients", plan.host_gradients},
            {"optimizer states", plan.host_optimizer_states},
            {"nvme staging", plan.host_staging}};
  if (plan.host_checkpoint > 0) {
    host["checkpoint"] = plan.host_checkpoint;
  }
  host["total"] = plan.host();
  return Json{{"stage", engine.config().zero.stage},
              {"optimizer_home", to_string(engine.optimizer_home())},
              {"device",
               {{"parameters", plan.device_parameters},
                {"gradients", plan.device_gradients},
                {"optimizer states", plan.device_optimizer_states},
                {"total", plan.device()}}},
              {"host", host},
              {"nvme",
               {{"parameters", plan.nvme_parameters},
                {"optimizer states", plan.nvme_optimizer_states},
                {"total", plan.nvme()}}},
              {"split", planner == nullptr ? Json(nullptr) : split_json(*planner)},
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
