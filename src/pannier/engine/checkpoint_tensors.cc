#include "pannier/engine/checkpoint_tensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using ckpt::DType;

constexpr std::array<std::pair<at::ScalarType, DType>, 17> kTypes{{{at::kBool, DType::kBool},
                                                                   {at::kByte, DType::kU8},
                                                                   {at::kChar, DType::kI8},
                                                                   {at::kFloat8_e5m2, DType::kF8E5M2},
                                                                   {at::kFloat8_e4m3fn, DType::kF8E4M3},
                                                                   {at::kFloat8_e8m0fnu, DType::kF8E8M0},
                                                                   {at::kUInt16, DType::kU16},
                                                                   {at::kShort, DType::kI16},
                                                                   {at::kHalf, DType::kF16},
                                                                   {at::kBFloat16, DType::kBF16},
                                                                   {at::kUInt32, DType::kU32},
                                                                   {at::kInt, DType::kI32},
                                                                   {at::kFloat, DType::kF32},
                                                                   {at::kUInt64, DType::kU64},
                                                                   {at::kLong, DType::kI64},
                                                                   {at::kDouble, DType::kF64},
                                                                   {at::kComplexFloat, DType::kC64}}};

}  // namespace

std::string model_tensor(const std::string& name) { return kModelPrefix + name; }

std::string state_tensor(const std::string& state, const std::string& name) {
  return fmt::format("optimizer.{}.{}", state, name);
}

ckpt::DType checkpoint_dtype(at::ScalarType type, const std::string& name) {
  for (const auto& [torch, ours] : kTypes) {
    if (torch == type) {
      return ours;
    }
  }
  throw ConfigError(fmt::format("'{}' is of type {}, which no checkpoint can hold", name, c10::toString(type)));
}

at::ScalarType torch_dtype(ckpt::DType type) {
  return std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& pair) { return pair.second == type; })->first;
}

std::vector<std::int64_t> memory_order(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return order;
  }
  // Where a dimension of one element lies does not matter: it stays in its place.
  std::vector<std::int64_t> moving;
  std::copy_if(order.begin(), order.end(), std::back_inserter(moving),
               [&](std::int64_t d) { return sizes[static_cast<std::size_t>(d)] > 1; });
  std::vector<std::int64_t> sorted = moving;
  std::stable_sort(sorted.begin(), sorted.end(), [&](std::int64_t a, std::int64_t b) {
    return strides[static_cast<std::size_t>(a)] > strides[static_cast<std::size_t>(b)];
  });
  for (std::size_t i = 0; i < moving.size(); ++i) {
    order[static_cast<std::size_t>(moving[i])] = sorted[i];
  }
  return order;
}

bool is_row_major(const std::vector<std::int64_t>& order) { return std::is_sorted(order.begin(), order.end()); }

std::vector<std::int64_t> in_order(at::IntArrayRef sizes, const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> result;
  for (const std::int64_t dimension : order) {
    result.push_back(sizes[static_cast<std::size_t>(dimension)]);
  }
  return result;
}

std::string order_text(const std::vector<std::int64_t>& order) { return fmt::format("{}", fmt::join(order, ",")); }

std::vector<std::int64_t> order_from(const std::string& text, std::size_t num_dimensions) {
  std::vector<std::int64_t> order(num_dimensions);
  std::iota(order.begin(), order.end(), 0);
  if (text.empty()) {
    return order;
  }
  std::vector<std::int64_t> found;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    found.push_back(part.size() == 1 && part[0] >= '0' && part[0] <= '9' ? part[0] - '0' : -1);
  }
  std::vector<std::int64_t> sorted = found;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != order) {
    throw ConfigError(fmt::format("'{}' is no order of {} dimensions", text, num_dimensions));
  }
  return found;
}

void bytes_to_host(Device& device, void* host, const at::Tensor& tensor, std::size_t offset, std::size_t nbytes) {
  const char* const from = static_cast<const char*>(tensor.data_ptr()) + offset;
  if (tensor.is_cpu()) {
    std::memcpy(host, from, nbytes);
  } else {
    device.copy_to_host(host, from, nbytes);
  }
}

void bytes_from_host(Device& device, const at::Tensor& tensor, std::size_t offset, const void* host,
                     std::size_t nbytes) {
  char* const to = static_cast<char*>(tensor.data_ptr()) + offset;
  if (tensor.is_cpu()) {
    std::memcpy(to, host, nbytes);
  } else {
    device.copy_to_device(to, host, nbytes);
  }
}

}  // namespace pannier
