// Host memory that a GPU reads and writes by itself: registered with CUDA in chunks, by several threads, since one call
// over tens of GiB takes many seconds.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "pannier/device/device.h"

namespace pannier {

/// Knows where registered chunks begin, since one copy must not reach over an edge. Thread-safe.
class RegisteredChunks {
 public:
  static constexpr std::size_t kChunkNbytes = std::size_t{1} << 30;

  void add(std::span<std::byte> memory);
  void remove(std::span<std::byte> memory) noexcept;
  /// How many of `nbytes` from `address` on one copy may take.
  [[nodiscard]] std::size_t reach(const void* address, std::size_t nbytes) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::span<std::byte>> areas_;
};

/// Registers `memory`. Null where CUDA refuses, with its `reason`; nothing stays registered then.
[[nodiscard]] std::unique_ptr<Registration> register_with_cuda(std::span<std::byte> memory, RegisteredChunks& chunks,
                                                               std::string& reason);

}  // namespace pannier
