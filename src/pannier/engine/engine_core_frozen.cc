// Which parameters go into buckets, in which order: those that are trained, then, where parameters are partitioned,
// frozen ones. Others are whole on the device, as the model's buffers are.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pannier/engine/engine_core.h"
#include "pannier/engine/tensor_span.h"
#include "pannier/zero/parts_plan.h"

namespace pannier {
namespace {

// `dense`: a tensor without gaps.
bool overlap(const at::Tensor& dense, const at::Tensor& other) {
  if (other.layout() != at::kStrided || !other.has_storage() || dense.numel() == 0 || other.numel() == 0) {
    return false;
  }
  const auto* begin = static_cast<const char*>(dense.const_data_ptr());
  const auto* other_begin = static_cast<const char*>(other.const_data_ptr());
  return begin < other_begin + spanned_nbytes(other) && other_begin < begin + dense.nbytes();
}

// Whether its bytes can be moved apart from everything else, and stand for it.
bool has_bytes_of_its_own(const at::Tensor& parameter, const std::vector<at::Tensor>& buffers) {
  if (parameter.layout() != at::kStrided || !parameter.has_storage() || parameter.is_quantized() ||
      parameter.is_conj() || parameter.is_neg() || parameter.unsafeGetTensorImpl()->is_python_dispatch() ||
      !parameter.is_non_overlapping_and_dense() || !parameter.is_leaf()) {
    return false;
  }
  return std::ranges::none_of(buffers, [&](const at::Tensor& buffer) { return overlap(parameter, buffer); });
}

}  // namespace

bool EngineCore::is_trained(const EngineInputs& inputs, std::size_t parameter) const {
  return inputs.algorithm && inputs.group_of[parameter] >= 0 && inputs.parameters[parameter].requires_grad();
}

// A share that a rank was given has no memory to look at, and is of a parameter that was partitioned before.
std::vector<std::size_t> EngineCore::number_parameters(const EngineInputs& inputs, PartsOptions& options) {
  std::vector<std::size_t> order;
  std::vector<std::size_t> frozen;
  const bool partitions = inputs.algorithm && shards_parameters(options, communicator_->world_size());
  for (std::size_t i = 0; i < inputs.parameters.size(); ++i) {
    if (is_trained(inputs, i)) {
      order.push_back(i);
      group_of_.push_back(inputs.group_of[i]);
    } else if (partitions && (inputs.is_shared_out(i) || has_bytes_of_its_own(inputs.parameters[i], inputs.buffers))) {
      frozen.push_back(i);
    }
  }
  const auto dtype = [&](std::size_t i) { return unmanaged_dtype(inputs.parameters[i]); };
  std::ranges::stable_sort(frozen, {}, dtype);
  for (const std::size_t i : frozen) {
    options.sharding.frozen_dtypes.push_back(dtype(i));
    order.push_back(i);
  }
  managed_of_.assign(inputs.parameters.size(), -1);
  for (std::size_t i = 0; i < order.size(); ++i) {
    managed_of_[order[i]] = static_cast<int>(i);
  }
  return order;
}

}  // namespace pannier
