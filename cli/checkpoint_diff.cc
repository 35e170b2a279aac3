#include "cli/checkpoint_diff.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "pannier/ckpt/share.h"

namespace pannier::cli {
namespace {

/// How far two tensors of one type are apart.
struct Distance {
  std::int64_t num_different = 0;
  double most = 0;  ///< Of fp32 elements.
};

void compare(const std::vector<std::byte>& a, const std::vector<std::byte>& b, ckpt::DType dtype, Distance& distance) {
  const std::size_t width = dtype_nbytes(dtype);
  for (std::size_t i = 0; i < a.size(); i += width) {
    if (std::memcmp(a.data() + i, b.data() + i, width) == 0) {
      continue;
    }
    ++distance.num_different;
    if (dtype == ckpt::DType::kF32) {
      float left = 0;
      float right = 0;
      std::memcpy(&left, a.data() + i, width);
      std::memcpy(&right, b.data() + i, width);
      distance.most = std::max(distance.most, std::abs(static_cast<double>(left) - static_cast<double>(right)));
    }
  }
}

Distance distance_of(ckpt::CheckpointReader& first, ckpt::CheckpointReader& second, const ckpt::TensorInfo& tensor) {
  Distance distance;
  const std::int64_t numel = *tensor.checked_numel();
  std::vector<std::byte> a;
  std::vector<std::byte> b;
  for (std::int64_t at = 0; at < numel; at = ckpt::chunk_end(at, numel)) {
    a.resize(static_cast<std::size_t>(ckpt::chunk_end(at, numel) - at) * dtype_nbytes(tensor.dtype));
    b.resize(a.size());
    first.read(tensor.name, at, a);
    second.read(tensor.name, at, b);
    compare(a, b, tensor.dtype, distance);
  }
  return distance;
}

bool print_attributes(const ckpt::Manifest& first, const ckpt::Manifest& second) {
  bool differs = first.step != second.step || first.world_size != second.world_size;
  if (differs) {
    fmt::print("step {} of {} ranks, step {} of {} ranks\n", first.step, first.world_size, second.step,
               second.world_size);
  }
  std::set<std::string> keys;
  for (const auto* manifest : {&first, &second}) {
    for (const auto& [key, value] : manifest->attributes) {
      keys.insert(key);
    }
  }
  for (const auto& key : keys) {
    const auto a = first.attributes.find(key);
    const auto b = second.attributes.find(key);
    const std::string left = a == first.attributes.end() ? "nothing" : a->second;
    const std::string right = b == second.attributes.end() ? "nothing" : b->second;
    if (left != right) {
      fmt::print("{}: {}, {}\n", key, left, right);
      differs = true;
    }
  }
  return differs;
}

}  // namespace

bool print_differences(ckpt::CheckpointReader& first, ckpt::CheckpointReader& second) {
  bool differs = print_attributes(first.manifest(), second.manifest());
  for (const auto& tensor : second.manifest().tensors) {
    if (first.find(tensor.name) == nullptr) {
      fmt::print("{}: only in {}\n", tensor.name, second.path());
      differs = true;
    }
  }
  for (const auto& tensor : first.manifest().tensors) {
    const ckpt::TensorInfo* other = second.find(tensor.name);
    if (other == nullptr) {
      fmt::print("{}: only in {}\n", tensor.name, first.path());
    } else if (other->dtype != tensor.dtype || other->shape != tensor.shape) {
      fmt::print("{}: {} {}, {} {}\n", tensor.name, dtype_name(tensor.dtype), tensor.shape, dtype_name(other->dtype),
                 other->shape);
    } else if (const Distance distance = distance_of(first, second, tensor); distance.num_different > 0) {
      fmt::print("{}: {} of {} elements differ{}\n", tensor.name, distance.num_different, *tensor.checked_numel(),
                 tensor.dtype == ckpt::DType::kF32 ? fmt::format(", by {:g} at most", distance.most) : "");
    } else {
      continue;
    }
    differs = true;
  }
  return differs;
}

}  // namespace pannier::cli
