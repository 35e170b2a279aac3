// The handle of one read or write that an I/O engine carries out while its caller does something else. However many
// pieces it was split into, it ends once: when no piece of it is under way any more.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "pannier/io/fork_safe_condition.h"

namespace pannier {

/// Told once, by an engine's thread, that a transfer ended, and whether it moved every byte. Must not throw, block, or
/// call the engine.
using OnTransferEnd = std::function<void(bool succeeded)>;

/// One transfer's way. Thread-safe. Outlives its engine where someone holds it.
class IoTransfer {
 public:
  /// Begins with `nbytes` to move; 0 ends at once.
  IoTransfer(std::size_t nbytes, OnTransferEnd on_end);

  /// Waits until every byte has been moved. Rethrows what went wrong: an IoError that names file, offset and bytes.
  void wait_done();
  /// Waits until nothing reads or writes the memory any more, whether the bytes are there or not.
  void wait_ended() noexcept;
  /// Whether it has ended, well or badly: wait_done() will not wait.
  [[nodiscard]] bool is_done() const;

  /// For the engine: takes `nbytes` off what is left, moved or (after an error) given up.
  void advance(std::size_t nbytes) noexcept;
  /// For the engine: the first error is kept. It ends when the rest has been given up.
  void fail(std::exception_ptr error) noexcept;
  [[nodiscard]] bool has_failed() const noexcept;

 private:
  mutable std::mutex state_mutex_;  ///< Guards everything below.
  ForkSafeCondition state_changed_;
  std::size_t nbytes_left_;
  bool has_ended_ = false;
  std::exception_ptr error_;
  OnTransferEnd on_end_;
};

/// Shared by the caller and the engine, either of which may be the last to need it.
using IoTransferPtr = std::shared_ptr<IoTransfer>;

}  // namespace pannier
