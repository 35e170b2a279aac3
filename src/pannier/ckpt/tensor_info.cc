#include "pannier/ckpt/tensor_info.h"

#include <algorithm>
#include <array>
#include <limits>

namespace pannier::ckpt {
namespace {

struct DTypeRow {
  std::string_view name;
  std::size_t nbytes;
};

// In the order of DType.
constexpr std::array kRows = {
    DTypeRow{"BOOL", 1},    DTypeRow{"U8", 1},  DTypeRow{"I8", 1},  DTypeRow{"F8_E5M2", 1}, DTypeRow{"F8_E4M3", 1},
    DTypeRow{"F8_E8M0", 1}, DTypeRow{"U16", 2}, DTypeRow{"I16", 2}, DTypeRow{"F16", 2},     DTypeRow{"BF16", 2},
    DTypeRow{"U32", 4},     DTypeRow{"I32", 4}, DTypeRow{"F32", 4}, DTypeRow{"U64", 8},     DTypeRow{"I64", 8},
    DTypeRow{"F64", 8},     DTypeRow{"C64", 8}};

}  // namespace

std::string_view dtype_name(DType dtype) noexcept { return kRows[static_cast<std::size_t>(dtype)].name; }

std::size_t dtype_nbytes(DType dtype) noexcept { return kRows[static_cast<std::size_t>(dtype)].nbytes; }

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  const auto* const row = std::find_if(kRows.begin(), kRows.end(), [&](const DTypeRow& r) { return r.name == name; });
  if (row == kRows.end()) {
    return std::nullopt;
  }
  return static_cast<DType>(row - kRows.begin());
}

std::optional<std::int64_t> TensorInfo::checked_numel() const noexcept {
  const auto limit = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(dtype_nbytes(dtype));
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && numel > limit / size)) {
      return std::nullopt;
    }
    numel *= size;
  }
  return numel;
}

}  // namespace pannier::ckpt
