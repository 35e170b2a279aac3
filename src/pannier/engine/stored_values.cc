#include "pannier/engine/stored_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pannier/base/error.h"
#include "pannier/engine/checkpoint_tensors.h"

namespace pannier {

std::vector<std::int64_t> sizes_out_of_order(const std::vector<std::int64_t>& stored,
                                             const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> sizes(stored.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    sizes[static_cast<std::size_t>(order[i])] = stored[i];
  }
  return sizes;
}

bool lies_as_stored(const ckpt::CheckpointReader& reader, const std::string& tensor, const std::string& stored_order,
                    at::IntArrayRef sizes, const std::vector<std::int64_t>& order) {
  const ckpt::TensorInfo& info = *reader.find(tensor);
  const auto from = order_from(stored_order, info.shape.size());
  if (const auto stored = sizes_out_of_order(info.shape, from); at::IntArrayRef(stored) != sizes) {
    throw ConfigError(
        fmt::format("'{}': tensor '{}' has shape {}, the model's has {}", reader.path(), tensor, stored, sizes.vec()));
  }
  return from == order;
}

void to_floats(std::span<const std::byte> bytes, ckpt::DType type, std::span<float> values) {
  const auto numel = static_cast<std::int64_t>(values.size());
  at::from_blob(values.data(), {numel}, at::kFloat)
      .copy_(at::from_blob(const_cast<std::byte*>(bytes.data()), {numel}, torch_dtype(type)));
}

std::vector<float> read_turned(ckpt::CheckpointReader& reader, const std::string& tensor,
                               const std::string& stored_order, at::IntArrayRef sizes,
                               const std::vector<std::int64_t>& order) {
  const ckpt::TensorInfo& info = *reader.find(tensor);
  const auto from = order_from(stored_order, info.shape.size());
  const auto stored = in_order(sizes, from);
  const auto numel = static_cast<std::size_t>(c10::multiply_integers(stored));
  std::vector<std::byte> bytes(numel * dtype_nbytes(info.dtype));
  reader.read(tensor, 0, bytes);
  std::vector<float> all(numel);
  to_floats(bytes, info.dtype, all);
  const at::Tensor as_stored = at::from_blob(all.data(), stored, at::kFloat);
  std::vector<std::int64_t> dimension_in_file(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    dimension_in_file[static_cast<std::size_t>(from[i])] = static_cast<std::int64_t>(i);
  }
  const at::Tensor wanted = as_stored.permute(dimension_in_file).permute(order);
  std::vector<float> turned(numel);
  at::from_blob(turned.data(), wanted.sizes(), at::kFloat).copy_(wanted);
  return turned;
}

}  // namespace pannier
