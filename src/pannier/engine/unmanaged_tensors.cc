#include "pannier/engine/unmanaged_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/engine/tensor_span.h"

namespace pannier {
namespace {

// A stretch begins at a multiple of this address, so that elements of any type have a whole offset in it.
constexpr std::size_t kAlignment = 16;

bool has_plain_bytes(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.numel() > 0 && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

void move_alone(at::Tensor tensor, c10::Device target, at::ScalarType dtype) {
  tensor.set_data(tensor.detach().to(target, dtype, /*non_blocking=*/false, /*copy=*/true));
}

}  // namespace

void UnmanagedTensors::add(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() != dtype || !has_plain_bytes(tensor)) {
    alone_.push_back({tensor, dtype});
    return;
  }
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto past = reinterpret_cast<std::uintptr_t>(data) % kAlignment;
  if (past % tensor.element_size() != 0) {  // No storage of torch's; nothing there can be pointed at.
    alone_.push_back({tensor, dtype});
    return;
  }
  placed_.push_back({data - past, data + spanned_nbytes(tensor), {tensor}});
}

std::vector<UnmanagedTensors::Stretch> UnmanagedTensors::shared_stretches() const {
  std::vector<Stretch> sorted = placed_;
  std::ranges::sort(sorted, {}, [](const Stretch& stretch) { return std::pair(stretch.begin, stretch.end); });
  std::vector<Stretch> merged;
  for (Stretch& stretch : sorted) {
    if (merged.empty() || stretch.begin >= merged.back().end) {
      merged.push_back(std::move(stretch));
      continue;
    }
    merged.back().end = std::max(merged.back().end, stretch.end);
    merged.back().tensors.push_back(stretch.tensors.front());
  }
  return merged;
}

std::size_t UnmanagedTensors::nbytes() const {
  std::size_t sum = 0;
  for (const Entry& entry : alone_) {
    sum += nbytes_of(entry.tensor.numel(), c10::elementSize(entry.dtype));
  }
  for (const Stretch& stretch : shared_stretches()) {
    sum += stretch.tensors.size() == 1 ? stretch.tensors.front().nbytes()
                                       : static_cast<std::size_t>(stretch.end - stretch.begin);
  }
  return sum;
}

void UnmanagedTensors::move(c10::Device target) const {
  const c10::NoGradGuard no_grad;
  // Finds what is shared before the first tensor moves.
  const std::vector<Stretch> stretches = shared_stretches();
  for (const Entry& entry : alone_) {
    if (target.is_cpu() || entry.tensor.device() != target || entry.tensor.scalar_type() != entry.dtype) {
      move_alone(entry.tensor, target, entry.dtype);
    }
  }
  for (const Stretch& stretch : stretches) {
    if (stretch.tensors.size() == 1) {
      move_alone(stretch.tensors.front(), target, stretch.tensors.front().scalar_type());
      continue;
    }
    const auto nbytes = static_cast<std::size_t>(stretch.end - stretch.begin);
    const auto bytes = at::TensorOptions().dtype(at::kByte);
    const at::Tensor moved = at::empty({static_cast<std::int64_t>(nbytes)}, bytes.device(target));
    moved.copy_(at::from_blob(const_cast<char*>(stretch.begin), moved.sizes(), bytes));
    for (at::Tensor tensor : stretch.tensors) {
      const auto offset = static_cast<const char*>(tensor.const_data_ptr()) - stretch.begin;
      const auto element = static_cast<std::ptrdiff_t>(tensor.element_size());
      PANNIER_CHECK(offset % element == 0, fmt::format("offset {} of elements of {} bytes", offset, element));
      at::Tensor view = at::empty({0}, tensor.options().device(target).requires_grad(false));
      view.set_(moved.storage(), offset / element, tensor.sizes(), tensor.strides());
      tensor.set_data(view);
    }
  }
}

}  // namespace pannier
