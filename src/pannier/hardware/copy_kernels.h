// Ways to copy memory. Which is the fastest differs between processors, so a yardstick tries them all.
#pragma once

#include <cstddef>
#include <vector>

namespace pannier {

/// One of them.
struct CopyKernel {
  const char* name;
  /// Copies; both addresses and `nbytes` must be multiples of kCopyAlignment. Thread-safe.
  void (*copy)(std::byte* to, const std::byte* from, std::size_t nbytes);
};

constexpr std::size_t kCopyAlignment = 64;

/// Those that this processor can run; the first is memcpy.
[[nodiscard]] std::vector<CopyKernel> available_copy_kernels();

}  // namespace pannier
