// A number that stands for a tensor's bits, to find out whether somebody wrote into it by a way that torch does not
// count (`param.data`), and whether ranks wrote the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pannier {

/// One number for each of `flat`, which are contiguous, one-dimensional and on one device. Other bits give other
/// numbers but for a chance of about 2^-64. Takes less than 1 MiB of the device beside them, and waits for it once.
[[nodiscard]] std::vector<std::int64_t> fingerprints(const std::vector<at::Tensor>& flat);

}  // namespace pannier
