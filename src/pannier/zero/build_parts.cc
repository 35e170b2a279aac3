#include "pannier/zero/build_parts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <numeric>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/device/dtype.h"

namespace pannier {
namespace {

std::vector<std::int64_t> bucket_numels(const BucketLayout& layout) {
  std::vector<std::int64_t> numels;
  for (const auto& bucket : layout.buckets()) {
    numels.push_back(bucket.numel);
  }
  return numels;
}

StateShape shape_of(const PartsOptions& options) {
  const auto names = kernels::state_names(options.algorithm, options.momentum);
  return state_shape_of(state_format_of(options.dtype), static_cast<int>(names.size()));
}

void build_home(const PartsOptions& options, Device& device, HostMemory& memory, Parts& parts) {
  const StateShape shape = shape_of(options);
  const GradientStoreOptions gradients{grad_type_of(options.dtype), options.accumulates, options.sum_in_own_type};
  const int num_buckets = parts.layout->num_buckets();
  switch (options.optimizer_home) {
    case Home::kDevice:
      parts.states = make_device_store(device, shape, num_buckets, [buckets = parts.parameters.get()](int bucket) {
        return buckets->bucket(bucket);
      });
      parts.gradients = make_device_gradients(device, parts.layout->num_parameters(), gradients);
      parts.path = make_device_path(device);
      return;
    case Home::kHost:
      parts.states = make_host_store(memory, shape, bucket_numels(*parts.layout));
      parts.gradients = make_host_gradients(device, memory, *parts.layout, gradients);
      parts.path = make_host_path(device, *parts.parameters);
      return;
    case Home::kNvme:
      break;
  }
  throw InternalError("a home without a store was asked for");
}

}  // namespace

MemoryPlanInput plan_input(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                           std::size_t unmanaged_nbytes) {
  const BucketLayout layout(numels, options.buckets);
  return {.bucket_numels = bucket_numels(layout),
          .parameter_numel = std::accumulate(numels.begin(), numels.end(), std::int64_t{0}),
          .shape = shape_of(options),
          .optimizer_home = options.optimizer_home,
          .accumulates = options.accumulates && !options.sum_in_own_type,
          .unmanaged_nbytes = unmanaged_nbytes,
          .host_page_nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE))};
}

Parts build_parts(const PartsOptions& options, Device& device, HostMemory& memory, std::vector<at::Tensor> parameters,
                  std::vector<std::string> names) {
  PANNIER_CHECK(0 <= options.stage && options.stage <= 3, fmt::format("stage {}", options.stage));
  std::vector<std::int64_t> numels;
  for (const auto& parameter : parameters) {
    numels.push_back(parameter.numel());
  }
  Parts parts;
  // With one rank there is nothing to partition, so the four stages differ in nothing: the same reducer serves all, and
  // no parameter is ever away. Ranks and their communicator are chosen here.
  parts.communicator = make_solo_communicator();
  parts.layout = std::make_unique<BucketLayout>(numels, options.buckets);
  parts.parameters =
      std::make_unique<ParameterBuckets>(device, *parts.layout, std::move(parameters), std::move(names), options.dtype);
  build_home(options, device, memory, parts);
  parts.pipeline = std::make_unique<UpdatePipeline>(
      UpdatePipelineParts{device, *parts.layout, *parts.parameters, *parts.gradients, *parts.states, *parts.path,
                          options.algorithm, state_format_of(options.dtype),
                          kernels::state_names(options.algorithm, options.momentum), options.initial_state1});
  parts.pipeline->initialize();
  parts.reducer = std::make_unique<GradientReducer>(device, *parts.layout, *parts.parameters, *parts.gradients,
                                                    *parts.communicator);
  return parts;
}

}  // namespace pannier
