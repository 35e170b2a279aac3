// The head of a safetensors file: 8 bytes of length (little endian), JSON padded by spaces, and from there on the
// tensors' bytes, one after the other without holes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pannier/ckpt/tensor_info.h"

namespace pannier::ckpt {

/// The longest JSON that readers accept, ours and others.
inline constexpr std::uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// A tensor and where its bytes lie, counted from the end of the header.
struct SafetensorsEntry {
  TensorInfo info;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::int64_t numel = 0;
};

/// What the head of a file says.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        ///< In the order of their bytes.
  std::map<std::string, std::string> metadata;  ///< `__metadata__`.
};

/// Checks all that the format promises of a file with `data_nbytes` after the header. Throws IoError naming `file`, the
/// tensor, the value and what was expected.
[[nodiscard]] SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_nbytes,
                                                         const std::string& file);

/// Lays `tensors` out in their order. Throws ConfigError naming the tensor for a name twice, "__metadata__" as a name,
/// text that is not UTF-8, or a shape that does not fit.
[[nodiscard]] SafetensorsHeader lay_out_safetensors(const std::vector<TensorInfo>& tensors,
                                                    std::map<std::string, std::string> metadata);

/// The bytes before the data: length and JSON, padded so that their sum is a multiple of `alignment` (itself one of 8).
/// Throws ConfigError when the header would be too long.
[[nodiscard]] std::string format_safetensors_header(const SafetensorsHeader& header, std::size_t alignment);

}  // namespace pannier::ckpt
