// What a bucket holds, in words: errors of a group of ranks name buckets by number.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pannier/layout/shard_layout.h"
#include "pannier/tier/state_view.h"

namespace pannier {

/// A function of a message that returns what the buckets named in it hold: "; bucket 3 holds head.weight and 2 more".
/// `names` are those of the parameters. Refers to nothing.
[[nodiscard]] std::function<std::string(const std::string&)> bucket_names(const BucketLayout& layout,
                                                                          const std::vector<std::string>& names);

/// What rests in elements of this rank's shard of a bucket: "head.weight and 2 more".
[[nodiscard]] std::string names_in(const ShardLayout& shards, int bucket, const ElementRange& range,
                                   const std::function<std::string(int parameter)>& name_of);

}  // namespace pannier
