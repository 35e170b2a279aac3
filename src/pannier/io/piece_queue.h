// What every I/O engine does, whatever carries its bytes: cuts transfers into pieces, hands them out (reads and writes
// in turn, so that neither waits for the whole of the other), and turns each result into progress, one more try, or an
// error. This is the one place where the kernel's results get a meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "pannier/io/disk_file.h"
#include "pannier/io/fork_safe_condition.h"
#include "pannier/io/io_transfer.h"

namespace pannier {

/// What an engine has done so far.
struct IoStats {
  std::uint64_t read_bytes = 0;     ///< Moved from disk to memory.
  std::uint64_t written_bytes = 0;  ///< Moved from memory to disk: the disk's wear.
  std::uint64_t reads = 0;          ///< Transfers pushed.
  std::uint64_t writes = 0;
  std::uint64_t pieces = 0;  ///< Handed to the kernel, again where a result was short.
  std::uint64_t short_results = 0;
  std::uint64_t errors = 0;
  std::size_t max_in_flight = 0;  ///< The most pieces that were under way at one time.
};

/// A part of a transfer that goes to the kernel as one request.
struct IoPiece {
  bool is_write = false;
  FilePlace place;
  std::byte* data = nullptr;
  int stalls = 0;  ///< Tries in a row that moved nothing.
  IoTransferPtr transfer;
};

/// Thread-safe. `file` must outlive it.
class PieceQueue {
 public:
  PieceQueue(const DiskFile& file, std::size_t piece_nbytes);

  /// Adds a transfer. `data` must stay until it has ended. Throws InternalError when it is not aligned, reaches beyond
  /// the file, or the queue is closed.
  IoTransferPtr push(bool is_write, std::uint64_t offset, std::byte* data, std::size_t nbytes, OnTransferEnd on_end);
  /// The next piece, if there is one now. Whoever takes it finishes it.
  [[nodiscard]] std::optional<IoPiece> try_pop();
  /// Waits for a piece; nothing once the queue is closed and empty.
  [[nodiscard]] std::optional<IoPiece> wait_pop();
  /// Takes the result of a piece: bytes moved, or a negative errno value.
  void finish(IoPiece piece, int result) noexcept;
  /// No transfer is added from now on; those that are there are carried out.
  void close() noexcept;
  /// Whether nothing is left and nothing will come.
  [[nodiscard]] bool is_exhausted() const;
  [[nodiscard]] IoStats stats() const;
  [[nodiscard]] const DiskFile& file() const noexcept { return file_; }

 private:
  /// What of a transfer has not been cut off yet.
  struct Remainder {
    std::uint64_t offset = 0;
    std::byte* data = nullptr;
    std::size_t nbytes = 0;
    IoTransferPtr transfer;
  };
  std::optional<IoPiece> pop_locked(std::vector<Remainder>& given_up);
  std::optional<IoPiece> cut_locked(bool is_write, std::vector<Remainder>& given_up);
  void give_up(std::vector<Remainder>& remainders) noexcept;
  void end_attempt(bool is_short, bool is_error, const IoPiece* again) noexcept;

  const DiskFile& file_;
  std::size_t piece_nbytes_;
  mutable std::mutex queue_mutex_;  ///< Guards everything below.
  ForkSafeCondition queue_changed_;
  std::deque<IoPiece> again_;
  std::deque<Remainder> reads_;
  std::deque<Remainder> writes_;
  bool write_is_next_ = false;
  bool is_closed_ = false;
  std::size_t in_flight_ = 0;
  IoStats stats_;
};

}  // namespace pannier
