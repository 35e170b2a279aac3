// The states of torch's random numbers, as a checkpoint keeps them for each rank.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "pannier/ckpt/safetensors_reader.h"
#include "pannier/engine/checkpoint.h"

namespace pannier {

/// Prefixes of the tensors in a rank's extra file.
inline constexpr const char* kRandomPrefix = "random.";
inline constexpr const char* kBytesPrefix = "bytes.";
inline constexpr const char* kBufferPrefix = "buffer.";

/// Those of the CPU's generator and, where `device` is another, of its own.
[[nodiscard]] std::vector<NamedTensor> random_states(c10::Device device);
/// Puts back what the extra file of a rank has of them.
void restore_random_states(const ckpt::SafetensorsReader& extra, c10::Device device);
/// A tensor of an extra file, on the CPU.
[[nodiscard]] at::Tensor read_extra(const ckpt::SafetensorsReader& extra, const ckpt::SafetensorsEntry& entry);

}  // namespace pannier
