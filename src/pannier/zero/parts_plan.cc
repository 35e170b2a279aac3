#include "pannier/zero/parts_plan.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <span>

#include "pannier/base/error.h"
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

// A bucket is gathered whole, so it must hold parameters of one unit. One that several units read is the last one's,
// which in a model's order is the innermost. Empty: all are one group.
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

std::size_t num_trained(const PartsOptions& options, const std::vector<std::int64_t>& numels) {
  const std::size_t num_frozen = options.sharding.frozen_dtypes.size();
  PANNIER_CHECK(num_frozen <= numels.size(), fmt::format("{} frozen of {} parameters", num_frozen, numels.size()));
  return numels.size() - num_frozen;
}

at::ScalarType dtype_of(const PartsOptions& options, const BucketLayout& layout, int bucket) {
  const auto& frozen = options.sharding.frozen_dtypes;
  const int first = layout.num_parameters() - static_cast<int>(frozen.size());
  const int parameter = layout.buckets()[static_cast<std::size_t>(bucket)].segments.front().parameter;
  return parameter < first ? options.dtype : frozen[static_cast<std::size_t>(parameter - first)];
}

std::vector<bool> partitioned(const BucketLayout& layout) {
  std::vector<bool> result;
  for (int b = 0; b < layout.num_buckets(); ++b) {
    result.push_back(layout.group_of(b) != kLastGroup);
  }
  return result;
}

// The largest unit, and beside it the one before, in backward, and what is gathered ahead: one unit at the least.
std::size_t gathered_nbytes(const PartsOptions& options, const BucketLayout& layout) {
  std::map<int, std::size_t> nbytes;
  std::size_t widest = 0;
  for (int b = 0; b < layout.num_buckets(); ++b) {
    const std::size_t width = c10::elementSize(dtype_of(options, layout, b));
    nbytes[layout.group_of(b)] += nbytes_of(layout.buckets()[static_cast<std::size_t>(b)].numel, width);
    widest = std::max(widest, width);
  }
  nbytes.erase(kLastGroup);
  std::size_t all = 0;
  std::size_t largest = 0;
  for (const auto& [group, of_group] : nbytes) {
    all += of_group;
    largest = std::max(largest, of_group);
  }
  const std::int64_t ahead = options.sharding.prefetch_numel;
  return std::min(all, 2 * largest + (ahead > 0 ? nbytes_of(ahead, widest) + largest : 0));
}

// Buckets of frozen parameters come after those that the plan's lists count.
FrozenShare frozen_share(const PartsOptions& options, const BucketLayout& layout, const ShardLayout& shards,
                         std::size_t first) {
  const std::vector<RestingShard> own = resting_shards(options, layout, shards.numels());
  const std::vector<std::int64_t> for_node = node_numels_of(shards);
  FrozenShare share;
  for (std::size_t b = first; b < own.size(); ++b) {
    const std::size_t width = c10::elementSize(own[b].dtype);
    const bool is_whole = layout.group_of(static_cast<int>(b)) == kLastGroup;
    share.whole_nbytes += is_whole ? nbytes_of(layout.buckets()[b].numel, width) : 0;
    share.own_nbytes += own[b].nbytes();
    share.node_nbytes += for_node.empty() ? 0 : nbytes_of(for_node[b], width);
  }
  return share;
}

// This rank's shards of the parameters that rest on the disk.
void plan_parameter_disk(const PartsOptions& options, const std::vector<RestingShard>& shards, MemoryPlanInput& input) {
  const NvmeStaging staging =
      nvme_staging(parameter_shape(unit_nbytes_of(shards)), in_units(shards), options.sharding.nvme);
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

BucketLayout trained_layout(const PartsOptions& options, const std::vector<std::int64_t>& numels, int world_size) {
  std::vector<int> groups = groups_of(options, numels, world_size);
  const std::size_t count = num_trained(options, numels);
  groups.resize(std::min(groups.size(), count));
  return BucketLayout(std::span(numels).first(count), options.buckets, groups);
}

BucketLayout model_layout(const PartsOptions& options, const std::vector<std::int64_t>& numels, int world_size) {
  BucketLayout layout = trained_layout(options, numels, world_size);
  const auto& dtypes = options.sharding.frozen_dtypes;
  PANNIER_CHECK(dtypes.empty() || shards_parameters(options, world_size), "frozen parameters without partitions");
  const std::vector<int> groups = groups_of(options, numels, world_size);
  const std::size_t count = num_trained(options, numels);
  for (std::size_t begin = 0, end = 0; begin < dtypes.size(); begin = end) {
    while (end < dtypes.size() && dtypes[end] == dtypes[begin]) {
      ++end;
    }
    layout = layout.followed_by(std::span(numels).subspan(count + begin, end - begin), options.buckets,
                                std::span(groups).subspan(count + begin, end - begin));
  }
  return layout;
}

std::vector<RestingShard> resting_shards(const PartsOptions& options, const BucketLayout& layout,
                                         std::vector<std::int64_t> numels) {
  std::vector<RestingShard> shards;
  for (int b = 0; b < layout.num_buckets(); ++b) {
    const std::int64_t numel = numels[static_cast<std::size_t>(b)];
    shards.push_back({layout.group_of(b) == kLastGroup ? 0 : numel, dtype_of(options, layout, b)});
  }
  return shards;
}

MemoryPlanInput plan_input(const PartsOptions& options, const std::vector<std::int64_t>& numels,
                           std::size_t unmanaged_nbytes, int rank, int world_size) {
  const BucketLayout layout = trained_layout(options, numels, world_size);
  const BucketLayout model = model_layout(options, numels, world_size);
  const bool partitions = shards_parameters(options, world_size);
  const int node_size = node_size_of(options, world_size);
  const ShardLayout shards(layout, rank, world_size, node_size);
  const ShardLayout all_shards(model, rank, world_size, node_size);
  const auto past_trained = numels.begin() + static_cast<std::ptrdiff_t>(num_trained(options, numels));
  MemoryPlanInput input{.bucket_numels = bucket_numels(layout),
                        .shard_numels = shards.numels(),
                        .node_numels = node_numels_of(shards),
                        .world_size = world_size,
                        .sums_on_each_rank = world_size > 1 && options.stage <= 1 && options.accumulates,
                        .parameter_numel = std::accumulate(numels.begin(), past_trained, std::int64_t{0}),
                        .is_partitioned = partitions ? partitioned(layout) : std::vector<bool>{},
                        .parameter_home = options.sharding.parameter_home,
                        .gathered_nbytes = partitions ? gathered_nbytes(options, model) : 0,
                        .frozen = frozen_share(options, model, all_shards, layout.buckets().size()),
                        .shape = shape_of(options),
                        .optimizer_home = options.optimizer_home,
                        .accumulates = options.accumulates && !options.sum_in_own_type,
                        .unmanaged_nbytes = unmanaged_nbytes,
                        .host_page_nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE))};
  if (partitions && options.sharding.parameter_home == Home::kNvme) {
    plan_parameter_disk(options, resting_shards(options, model, all_shards.numels()), input);
  }
  if (options.optimizer_home == Home::kNvme) {
    plan_disk(options, input);
  }
  return input;
}

}  // namespace pannier
