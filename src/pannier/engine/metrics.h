// What an engine reports, as JSON: memory by tier and owner, the plan, the timeline. Measured figures come from the
// allocator that served them.
#pragma once

#include <string>
#include <vector>

#include "pannier/device/memory_meter.h"
#include "pannier/engine/engine_core.h"

namespace pannier {

/// {"device": {"current", "peak", "cap", "by_owner": {owner: {"current", "peak"}}}, "host": {...}, "nvme": {...}}, in
/// bytes; of the last also what was "read" and "written" since the start. {"checkpoint": {"is_being_written",
/// "waited_s": how long steps were held back by states that a checkpoint still read}}.
[[nodiscard]] std::string memory_stats_json(EngineCore& engine);

/// The device's half of the above, which needs no engine.
[[nodiscard]] std::string device_memory_json(const DeviceMemory& memory);

/// {"device": {owner: bytes, "total"}, "host": {...}, "nvme": {...}, "stage", "optimizer_home", "text": the table for
/// people}. Once a step was taken, the text names the measured peak of activations.
[[nodiscard]] std::string plan_json(EngineCore& engine);

/// [[seconds, {owner: bytes}], ...].
[[nodiscard]] std::string timeline_json(const std::vector<MemorySample>& samples);

}  // namespace pannier
