// The memory between a strided tensor's first and last element.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "pannier/base/units.h"

namespace pannier {

/// Bytes from the first element to behind the last; with gaps between, not all of them are the tensor's. The tensor has
/// elements.
[[nodiscard]] inline std::size_t spanned_nbytes(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return nbytes_of(last + 1, static_cast<std::size_t>(tensor.element_size()));
}

}  // namespace pannier
