// Asynchronous reads and writes of a DiskFile. Transfers are cut into pieces, and up to `depth` pieces of all transfers
// together are with the disk at one time, so that small transfers fill it as large ones do. Two engines do it:
// io_uring, and where the kernel does not allow that (containers often do not), a team of threads with pread and
// pwrite. Both move the same bytes; which one it is was decided at construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/io/disk_file.h"
#include "pannier/io/io_transfer.h"
#include "pannier/io/piece_hook.h"
#include "pannier/io/piece_queue.h"

namespace pannier {

/// What carries the bytes.
enum class IoEngineKind {
  kAuto,     ///< io_uring where it works, else threads.
  kUring,    ///< io_uring, or an error.
  kThreads,  ///< pread and pwrite.
};

/// Options of an I/O engine.
struct IoEngineOptions {
  IoEngineKind kind = IoEngineKind::kAuto;
  std::size_t piece_nbytes = std::size_t{1} << 20;  ///< The largest request to the kernel; a multiple of kIoAlignment.
  int depth = 32;                                   ///< Pieces with the disk at one time, 1 to 1024.
  /// Memory that most transfers use, each span under 1 GiB, in place while the engine lives: registered with the kernel
  /// once, where it lets us (StagingPool::regions()). Other memory works too.
  std::vector<std::span<std::byte>> buffers = {};
  PieceHook* hook = nullptr;  ///< For tests; must outlive the engine.
  /// Throws ConfigError when a field makes no sense.
  void validate() const;
};

/// Carries transfers out on threads of its own, in any order: a transfer that must see another's bytes is pushed after
/// that one has ended. Thread-safe. The file must outlive it. A failed transfer does not harm later ones. In a forked
/// child it must not be used, and does nothing when destroyed.
class IoEngine {
 public:
  virtual ~IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  /// Starts to read `to.size()` bytes. Offset, size and memory are multiples of kIoAlignment; the memory must stay
  /// until the transfer has ended. `on_end` is called when it has, before those who wait for it wake.
  [[nodiscard]] IoTransferPtr read(std::uint64_t offset, std::span<std::byte> to, OnTransferEnd on_end = nullptr);
  /// Starts to write; the same rules.
  [[nodiscard]] IoTransferPtr write(std::uint64_t offset, std::span<const std::byte> from,
                                    OnTransferEnd on_end = nullptr);
  /// Carries out what was pushed, then ends the threads. Later transfers throw. Also what destruction does.
  virtual void close() noexcept = 0;

  [[nodiscard]] IoStats stats() const { return queue_.stats(); }
  /// "io_uring" or "threads".
  [[nodiscard]] virtual const char* name() const noexcept = 0;
  /// What a user may want to know: why io_uring is not used, or why its buffers are not registered.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }
  [[nodiscard]] const DiskFile& file() const noexcept { return queue_.file(); }

 protected:
  IoEngine(const DiskFile& file, const IoEngineOptions& options);
  virtual void wake() noexcept {}

  PieceQueue queue_;
  std::vector<std::string> notes_;

 private:
  friend std::unique_ptr<IoEngine> make_io_engine(const DiskFile& file, const IoEngineOptions& options);
};

/// Starts the engine that `options` ask for; io_uring is proved by a block of each file first. Throws IoError when
/// kUring is asked for and the kernel refuses it, or the block does not come back.
[[nodiscard]] std::unique_ptr<IoEngine> make_io_engine(const DiskFile& file, const IoEngineOptions& options = {});

}  // namespace pannier
