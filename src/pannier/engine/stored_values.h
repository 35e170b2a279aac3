// A tensor of a checkpoint that can't be read in runs as it lies there, because somebody has transposed the parameter
// since: ranges of its memory are no ranges of the file's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"

namespace pannier {

/// Sizes of a tensor whose dimensions are stored in an order.
[[nodiscard]] std::vector<std::int64_t> sizes_out_of_order(const std::vector<std::int64_t>& stored,
                                                           const std::vector<std::int64_t>& order);

/// Throws ConfigError where a stored tensor's shape is not that of the parameter. Returns whether runs of the
/// parameter's memory, whose order is `order`, are runs of the file's.
[[nodiscard]] bool lies_as_stored(const ckpt::CheckpointReader& reader, const std::string& tensor,
                                  const std::string& stored_order, at::IntArrayRef sizes,
                                  const std::vector<std::int64_t>& order);

/// All of it in the memory order of the parameter, as fp32.
[[nodiscard]] std::vector<float> read_turned(ckpt::CheckpointReader& reader, const std::string& tensor,
                                             const std::string& stored_order, at::IntArrayRef sizes,
                                             const std::vector<std::int64_t>& order);

/// Converts elements of a stored type.
void to_floats(std::span<const std::byte> bytes, ckpt::DType type, std::span<float> values);

}  // namespace pannier
