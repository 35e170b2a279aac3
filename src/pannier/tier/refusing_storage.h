// Storage that has a size and no memory: a tensor on it keeps its shape, can be viewed, and throws a message of ours
// when anybody reads or writes it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace pannier {

/// Storage of `nbytes` on `device` whose every access throws `message`.
[[nodiscard]] c10::Storage make_refusing_storage(std::size_t nbytes, c10::Device device, const std::string& message);

/// Takes a tensor's memory away: it keeps its shape, and who reads it is told `message`. Views of it keep the memory.
void take_memory(const at::Tensor& tensor, const std::string& message);

}  // namespace pannier
