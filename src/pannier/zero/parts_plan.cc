#include "pannier/zero/parts_plan.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "pannier/base/units.h"
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

std::vector<bool> partitioned(const BucketLayout& layout) {
  std::vector<bool> result;
  for (int b = 0; b < layout.num_buckets(); ++b) {
    result.push_back(layout.group_of(b) != kLastGroup);
  }
  return result;
}

// The largest unit, and beside it the one before, in backward, and what is gathered ahead: one unit at the least.
std::int64_t gathered_numel(const PartsOptions& options, const BucketLayout& layout) {
  std::map<int, std::int64_t> numels;
  for (int b = 0; b < layout.num_buckets(); ++b) {
    numels[layout.group_of(b)] += layout.buckets()[static_cast<std::size_t>(b)].numel;
  }
  numels.erase(kLastGroup);
  std::int64_t all = 0;
  std::int64_t largest = 0;
  for (const auto& [group, numel] : numels) {
    all += numel;
    largest = std::max(largest, numel);
  }
  const std::int64_t ahead = options.sharding.prefetch_numel;
  return std::min(all, 2 * largest + (ahead > 0 ? ahead + largest : 0));
}

// This rank's shards of the parameters that rest on the disk.
void plan_parameter_disk(const PartsOptions& options, MemoryPlanInput& input) {
  std::vector<std::int64_t> numels = shards_of(input);
  for (std::size_t b = 0; b < numels.size(); ++b) {
    numels[b] = input.is_partitioned[b] ? numels[b] : 0;
  }
  const NvmeStaging staging = nvme_staging(parameter_shape(input.shape.param_nbytes), numels, options.sharding.nvme);
  input.nvme_parameters = {staging.file_nbytes, staging.staging_nbytes(), staging.host_nbytes()};
}

// What the host's budget leaves holds states that would rest on the disk.
void plan_disk(const PartsOptions& options, MemoryPlanInput& input) {
  NvmeStateOptions nvme = options.nvme;
  const auto take = [&] {
    const NvmeStaging staging = nvme_staging(input.shape, shards_of(input), nvme);
    input.nvme_states = {staging.file_nbytes, staging.staging_nbytes(), staging.host_nbytes()};
  };
  take();
  if (options.host_budget) {
    nvme.host_nbytes = saturating_sub(*options.host_budget, plan_memory(input).host());
    take();
  }
}

}  // namespace

StateShape shape_of(const PartsOptions& options) {
  const auto names = kernels::state_names(options.algorithm, options.momentum);
  return state_shape_of(state_format_of(options.dtype), static_cast<int>(names.size()));
}

bool shards_parameters(const PartsOptions& options, int world_size) {
  return options.stage == 3 && (world_size > 1 || options.sharding.parameter_home != Home::kDevice);
}

int node_size_of(const PartsOptions& options, int world_size) {
  const int asked = options.sharding.node_size;
  return asked == 0 || !shards_parameters(options, world_size) ? world_size : asked;
}

std::vector<std::int64_t> node_numels_of(const ShardLayout& shards) {
  std::vector<std::int64_t> numels;
  for (int b = 0; shards.node_size() < shards.world_size() && b < shards.buckets().num_buckets(); ++b) {
    numels.push_back(shards.buckets().group_of(b) == kLastGroup ? 0 : shards.node_part(b, shards.rank()).numel());
  }
  return numels;
}

// A bucket is gathered whole, so it must hold parameters of one unit. One that several units read is the last one's,
// which in a model's order is the innermost.
std::vector<int> groups_of(const PartsOptions& options, const std::vector<std::int64_t>& numels, int world_size) {
  if (!shards_parameters(options, world_size)) {
    return {};
  }
  std::vector<int> groups(numels.size(), 0);
  for (std::size_t unit = 0; unit < options.sharding.units.size(); ++unit) {
    for (const int parameter : options.sharding.units[unit]) {
      groups[static_cast<std::size_t>(parameter)] = static_cast<int>(unit);
    }
  }
  for (std::size_t i = 0; i < numels.size(); ++i) {
    groups[i] = numels[i] <= options.sharding.persistence_numel ? kLastGroup : groups[i];
  }
  return groups;
}

MemoryPlanInput plan_input(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                           std::size_t unmanaged_nbytes, int rank, int world_size) {
  const BucketLayout layout(numels, options.buckets, groups_of(options, numels, world_size));
  const bool partitions = shards_parameters(options, world_size);
  const ShardLayout shards(layout, rank, world_size, node_size_of(options, world_size));
  MemoryPlanInput input{.bucket_numels = bucket_numels(layout),
                        .shard_numels = shards.numels(),
                        .node_numels = node_numels_of(shards),
                        .world_size = world_size,
                        .sums_on_each_rank = world_size > 1 && options.stage <= 1 && options.accumulates,
                        .parameter_numel = std::accumulate(numels.begin(), numels.end(), std::int64_t{0}),
                        .is_partitioned = partitions ? partitioned(layout) : std::vector<bool>{},
                        .parameter_home = options.sharding.parameter_home,
                        .gathered_numel = partitions ? gathered_numel(options, layout) : 0,
                        .shape = shape_of(options),
                        .optimizer_home = options.optimizer_home,
                        .accumulates = options.accumulates && !options.sum_in_own_type,
                        .unmanaged_nbytes = unmanaged_nbytes,
                        .host_page_nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE))};
  if (partitions && options.sharding.parameter_home == Home::kNvme) {
    plan_parameter_disk(options, input);
  }
  if (options.optimizer_home == Home::kNvme) {
    plan_disk(options, input);
  }
  return input;
}

}  // namespace pannier
