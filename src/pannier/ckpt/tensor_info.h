// What a file or a manifest says of a tensor before its bytes: name, element type, shape. Element types carry the names
// that safetensors gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pannier::ckpt {

/// An element type of whole bytes.
enum class DType : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64
};

/// "BF16", "F32" and so on.
[[nodiscard]] std::string_view dtype_name(DType dtype) noexcept;
/// Nothing when no type has that name.
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name) noexcept;
/// Bytes of one element.
[[nodiscard]] std::size_t dtype_nbytes(DType dtype) noexcept;

/// A tensor without its data.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape = {};

  /// Elements; nothing when a size is negative or when the bytes would not fit 63 bits.
  [[nodiscard]] std::optional<std::int64_t> checked_numel() const noexcept;
  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

}  // namespace pannier::ckpt
