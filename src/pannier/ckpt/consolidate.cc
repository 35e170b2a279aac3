#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <sstream>
#include <system_error>

#include "pannier/base/error.h"
#include "pannier/ckpt/model_export.h"
#include "pannier/ckpt/share.h"
#include "pannier/kernels/convert.h"

namespace pannier::ckpt {
namespace {

constexpr std::string_view kModel = "model.";

bool is_float(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16 || type == DType::kF64;
}

float half_to_float(std::uint16_t half) {
  const auto sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const auto exponent = static_cast<std::uint32_t>(half >> 10) & 0x1FU;
  const std::uint32_t fraction = half & 0x3FFU;
  if (exponent == 0) {  // Zero, or below the least normal number.
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return sign == 0 ? value : -value;
  }
  const std::uint32_t wide = exponent == 0x1FU ? 0xFFU : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

std::vector<std::int64_t> order_of(const CheckpointReader& reader, const std::string& name) {
  std::vector<std::int64_t> order;
  std::istringstream stream(reader.attribute("order." + name));
  for (std::string part; std::getline(stream, part, ',');) {
    order.push_back(std::stoll(part));
  }
  return order;
}

// How the file's dimensions lie in the model's: sizes of the model's, and the file's stride of each.
struct Turned {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

Turned turned(const TensorInfo& info, const std::vector<std::int64_t>& order, const std::string& path) {
  Turned result{info.shape, info.shape};
  std::vector<bool> seen(order.size());
  std::int64_t stride = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const auto dimension = static_cast<std::size_t>(order[i]);
    if (order.size() != info.shape.size() || order[i] < 0 || dimension >= order.size() || seen[dimension]) {
      throw IoError(fmt::format("'{}': the order of tensor '{}' is none", path, info.name), EBADMSG);
    }
    seen[dimension] = true;
    result.sizes[dimension] = info.shape[i];
    result.strides[dimension] = stride;
    stride *= info.shape[i];
  }
  return result;
}

// Rows after one another, of elements that lie in another order. All in memory: such tensors are rare.
std::vector<std::byte> in_rows(const std::vector<std::byte>& stored, const Turned& turned, std::size_t width) {
  std::vector<std::byte> rows(stored.size());
  std::vector<std::int64_t> at(turned.sizes.size());
  for (std::size_t i = 0; i < stored.size() / width; ++i) {
    const auto from =
        static_cast<std::size_t>(std::inner_product(at.begin(), at.end(), turned.strides.begin(), std::int64_t{0}));
    std::memcpy(rows.data() + i * width, stored.data() + from * width, width);
    for (std::size_t d = at.size(); d-- > 0 && ++at[d] == turned.sizes[d];) {
      at[d] = 0;
    }
  }
  return rows;
}

/// One tensor of the model on its way from checkpoint to export.
struct Tensor {
  const TensorInfo* stored;
  TensorInfo exported;
  std::vector<std::int64_t> order;
};

Tensor tensor_of(const CheckpointReader& reader, const TensorInfo& info, DType type) {
  Tensor tensor{&info, {info.name.substr(kModel.size()), info.dtype, info.shape}, {}};
  tensor.order = order_of(reader, tensor.exported.name);
  if (!tensor.order.empty()) {
    tensor.exported.shape = turned(info, tensor.order, reader.path()).sizes;
  }
  if (is_float(info.dtype) && reader.attribute("kind." + tensor.exported.name) != "buffer") {
    tensor.exported.dtype = type;
  }
  return tensor;
}

void send(const Tensor& tensor, std::span<const std::byte> bytes, ModelExport& model) {
  if (tensor.exported.dtype == tensor.stored->dtype) {
    model.write(bytes);
    return;
  }
  std::vector<float> values;
  std::vector<std::byte> converted;
  widen_values(bytes, tensor.stored->dtype, values);
  convert_values(values, tensor.exported.dtype, converted);
  model.write(converted);
}

void send_all(CheckpointReader& reader, const Tensor& tensor, ModelExport& model) {
  const std::int64_t numel = *tensor.stored->checked_numel();
  const std::size_t width = dtype_nbytes(tensor.stored->dtype);
  std::vector<std::byte> bytes;
  if (!tensor.order.empty() && numel > 0) {
    bytes.resize(static_cast<std::size_t>(numel) * width);
    reader.read(tensor.stored->name, 0, bytes);
    send(tensor, in_rows(bytes, turned(*tensor.stored, tensor.order, reader.path()), width), model);
    return;
  }
  for (std::int64_t at = 0; at < numel; at = chunk_end(at, numel)) {
    bytes.resize(static_cast<std::size_t>(chunk_end(at, numel) - at) * width);
    reader.read(tensor.stored->name, at, bytes);
    send(tensor, bytes, model);
  }
}

}  // namespace

void convert_values(std::span<const float> values, DType type, std::vector<std::byte>& bytes) {
  const auto numel = static_cast<std::int64_t>(values.size());
  bytes.resize(values.size() * dtype_nbytes(type));
  if (type == DType::kF32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else if (type == DType::kF16) {
    kernels::to_fp16(values.data(), reinterpret_cast<std::uint16_t*>(bytes.data()), numel, serial_for);
  } else if (type == DType::kBF16) {
    std::vector<std::int16_t> rest(values.size());
    kernels::split_master(values.data(), reinterpret_cast<std::uint16_t*>(bytes.data()), rest.data(), numel,
                          serial_for);
  } else {
    throw ConfigError(fmt::format("a model can be written as fp32, bf16 or fp16, not as {}", dtype_name(type)));
  }
}

void widen_values(std::span<const std::byte> bytes, DType type, std::vector<float>& values) {
  const std::size_t width = dtype_nbytes(type);
  values.resize(bytes.size() / width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::byte* const from = bytes.data() + i * width;
    std::uint16_t half = 0;
    double wide = 0;
    switch (type) {
      case DType::kF32:
        std::memcpy(&values[i], from, width);
        break;
      case DType::kBF16:
        std::memcpy(&half, from, width);
        values[i] = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
        break;
      case DType::kF16:
        std::memcpy(&half, from, width);
        values[i] = half_to_float(half);
        break;
      case DType::kF64:
        std::memcpy(&wide, from, width);
        values[i] = static_cast<float>(wide);
        break;
      default:
        throw ConfigError(fmt::format("{} is no floating-point type of a parameter", dtype_name(type)));
    }
  }
}

std::vector<std::string> consolidate(CheckpointReader& reader, const std::string& folder, DType type,
                                     const ModelExportOptions& options) {
  std::vector<Tensor> tensors;
  std::vector<TensorInfo> infos;
  for (const auto& info : reader.manifest().tensors) {
    if (info.name.starts_with(kModel)) {
      tensors.push_back(tensor_of(reader, info, type));
      infos.push_back(tensors.back().exported);
    }
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw IoError(fmt::format("make folder '{}'", folder), error.value());
  }
  const SealedFolder sealed(folder);
  ModelExport model(sealed, std::move(infos), options);
  for (const auto& tensor : tensors) {
    send_all(reader, tensor, model);
  }
  model.finish();
  return model.files();
}

}  // namespace pannier::ckpt
