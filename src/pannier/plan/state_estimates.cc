#include "pannier/plan/state_estimates.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr double kParameterBytes = 2;   // 16 bit.
constexpr double kOffloadedBytes = 16;  // Master, two moments and an fp32 gradient.
constexpr double kAllBytes = 18;        // The same, with the 16-bit gradient.
constexpr double kInitialBytes = 4;     // The model as it is built, in fp32, by each rank.
constexpr double kLayerBytes = 4;       // A whole layer: 16-bit parameters and gradients.

}  // namespace

void StateEstimateInput::validate() const {
  if (numel < 0 || largest_layer_numel < 0) throw ConfigError("numbers of parameters must not be negative");
  if (gpus_per_node < 1 || nodes < 1) {
    throw ConfigError(fmt::format("GPUs per node ({}) and nodes ({}) must be at least 1", gpus_per_node, nodes));
  }
  if (!(buffer_factor > 0) || !std::isfinite(buffer_factor)) {
    throw ConfigError(fmt::format("the buffer factor must be above 0, not {}", buffer_factor));
  }
}

StateEstimate estimate_stage_2(const StateEstimateInput& input) {
  input.validate();
  const auto numel = static_cast<double>(input.numel);
  const double gpus = static_cast<double>(input.gpus_per_node) * input.nodes;
  if (input.offloads_optimizer) {
    return {.host_bytes = numel * std::max(kInitialBytes * gpus, kOffloadedBytes) * input.buffer_factor,
            .device_bytes = kParameterBytes * numel};
  }
  return {.host_bytes = numel * kInitialBytes * input.gpus_per_node * input.buffer_factor,
          .device_bytes = kParameterBytes * numel + std::floor(kAllBytes * numel / gpus)};
}

StateEstimate estimate_stage_3(const StateEstimateInput& input) {
  input.validate();
  const auto numel = static_cast<double>(input.numel);
  const double gpus = static_cast<double>(input.gpus_per_node) * input.nodes;
  const double layer = kLayerBytes * static_cast<double>(input.largest_layer_numel);
  const double built = kInitialBytes * input.gpus_per_node;
  const double nodes = input.nodes;
  if (!input.offloads_optimizer) {
    const double host = input.built_in_shards ? layer * input.gpus_per_node : numel * built;
    return {.host_bytes = host * input.buffer_factor, .device_bytes = layer + std::floor(kAllBytes * numel / gpus)};
  }
  const double resting = (input.offloads_parameters ? kAllBytes : kOffloadedBytes) / nodes;
  const double per_parameter = input.built_in_shards ? resting : std::max(built, resting);
  const double device = input.offloads_parameters ? 0 : std::floor(kParameterBytes * numel / gpus);
  return {.host_bytes = numel * per_parameter * input.buffer_factor, .device_bytes = layer + device};
}

}  // namespace pannier
