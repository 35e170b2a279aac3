// What a bucket holds, in words: errors of a group of ranks name buckets by number.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pannier/layout/bucket_layout.h"

namespace pannier {

/// A function of a message that returns what the buckets named in it hold: "; bucket 3 holds head.weight and 2 more".
/// `names` are those of the parameters. Refers to nothing.
[[nodiscard]] std::function<std::string(const std::string&)> bucket_names(const BucketLayout& layout,
                                                                          const std::vector<std::string>& names);

}  // namespace pannier
