// Stands between the engines and the kernel: sees each piece before it goes to the disk and its result after. Training
// uses none; tests make a disk fail, stop short, lag or lie with it (io/faulty_disk.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace pannier {

/// One piece as it is about to be handed to the kernel.
struct IoAttempt {
  bool is_write = false;
  std::size_t file = 0;       ///< Which of the DiskFile's files.
  std::uint64_t offset = 0;   ///< In that file.
  std::byte* data = nullptr;  ///< Read into, or (a write) only read from.
  std::size_t nbytes = 0;
  std::size_t hook_word = 0;  ///< The hook's own, kept from before() to after().
};

/// Called by the engine's threads, so implementations must be thread-safe, and must not throw.
class PieceHook {
 public:
  virtual ~PieceHook() = default;
  /// May shorten `attempt`, wait, or answer in the disk's place: bytes moved, or a negative errno value.
  virtual std::optional<int> before(IoAttempt& attempt) = 0;
  /// May change what was read, and the result.
  virtual int after(const IoAttempt& attempt, int result) = 0;
};

}  // namespace pannier
