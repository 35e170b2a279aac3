// Names, types and memory orders: how the tensors of an engine are called and laid out in a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pannier/ckpt/tensor_info.h"
#include "pannier/device/device.h"

namespace pannier {

/// The checkpoint's name of a tensor of the model, and of a state of one.
[[nodiscard]] std::string model_tensor(const std::string& name);
[[nodiscard]] std::string state_tensor(const std::string& state, const std::string& name);
inline constexpr const char* kModelPrefix = "model.";

/// Throws ConfigError naming the tensor for a type that a checkpoint can't hold.
[[nodiscard]] ckpt::DType checkpoint_dtype(at::ScalarType type, const std::string& name);
[[nodiscard]] at::ScalarType torch_dtype(ckpt::DType type);

/// Dimensions from the slowest to the fastest in memory: 0, 1, 2... for a tensor whose rows follow one another.
[[nodiscard]] std::vector<std::int64_t> memory_order(at::IntArrayRef sizes, at::IntArrayRef strides);
[[nodiscard]] bool is_row_major(const std::vector<std::int64_t>& order);
[[nodiscard]] std::vector<std::int64_t> in_order(at::IntArrayRef sizes, const std::vector<std::int64_t>& order);
/// "1,0" and back. Throws ConfigError for what is no order.
[[nodiscard]] std::string order_text(const std::vector<std::int64_t>& order);
[[nodiscard]] std::vector<std::int64_t> order_from(const std::string& text, std::size_t num_dimensions);

/// Copies bytes of a contiguous tensor to host memory, wherever it is, and back.
void bytes_to_host(Device& device, void* host, const at::Tensor& tensor, std::size_t offset, std::size_t nbytes);
void bytes_from_host(Device& device, const at::Tensor& tensor, std::size_t offset, const void* host,
                     std::size_t nbytes);

}  // namespace pannier
