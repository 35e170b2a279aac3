// Extents on a disk that may fail or lie. Each has a checksum, which rests in memory beside its state, not in the file,
// so that a write that never reached the disk is found too. The states keep read-ahead and write-behind apart: the
// disk's bytes of an extent that is being written, or whose write failed, are nobody's to read; whoever wants them has
// them in the staging buffer that they are written from.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/io/extent_table.h"
#include "pannier/io/fork_safe_condition.h"
#include "pannier/io/io_engine.h"

namespace pannier {

/// An extent came back from the disk as something else than was written.
class ChecksumError : public IoError {
 public:
  ChecksumError(const std::string& what_failed, std::size_t extent);
  [[nodiscard]] std::size_t extent() const noexcept { return extent_; }

 private:
  std::size_t extent_;
};

/// How an extent's bytes on disk stand.
enum class ExtentState : std::uint8_t {
  kEmpty,    ///< Never written.
  kClean,    ///< As last written.
  kReading,  ///< Clean, and being read.
  kWriting,  ///< Neither old nor new: the bytes are in the buffer that is being written.
  kDirty,    ///< A write failed: neither old nor new. To be written again.
};

/// Who compares a read extent with its checksum.
enum class Verify : std::uint8_t {
  kOnWait,    ///< wait_done(), in a pass over the bytes.
  kByCaller,  ///< The caller, who hashes tiles as it uses them and then calls verify().
};

/// The handle of one extent's read or write. Copies are handles of the same; wait_done() by one thread at a time.
class ExtentTransfer {
 public:
  /// Waits until every byte has been moved. Rethrows an IoError that names extent, label, file, offset and bytes;
  /// throws ChecksumError when the bytes read are not the ones written.
  void wait_done();
  /// Waits until nothing reads or writes the buffer any more.
  void wait_ended() noexcept { transfer_->wait_ended(); }
  /// Whether it has ended, well or badly.
  [[nodiscard]] bool is_done() const { return transfer_->is_done(); }

 private:
  friend class ExtentFile;
  IoTransferPtr transfer_;
  std::size_t index_ = 0;
  std::string what_;
  std::span<const std::byte> to_verify_ = {};  ///< Null when there is nothing to compare.
  std::uint64_t expected_ = 0;
};

/// Reads and writes extents by their indices. Thread-safe. The engine must outlive it. Destruction waits for what is
/// under way, but not in a forked child.
class ExtentFile {
 public:
  /// Throws InternalError when the table does not fit in the engine's file.
  ExtentFile(ExtentTable table, IoEngine& engine);
  ExtentFile(const ExtentFile&) = delete;
  ExtentFile& operator=(const ExtentFile&) = delete;
  ~ExtentFile();

  /// Starts to read extent `index` into the first bytes of `buffer`, which is aligned to kIoAlignment and holds at
  /// least its padded bytes. Throws InternalError unless the extent is clean, or is being read already.
  [[nodiscard]] ExtentTransfer read(std::size_t index, std::span<std::byte> buffer, Verify verify = Verify::kOnWait);
  /// Starts to write extent `index` from `buffer`; the bytes behind its own, up to the padded size, become zero. The
  /// buffer must stay as it is until the transfer has ended, and be kept if it failed. `checksum` is the caller's sum
  /// over the tiles; without it they are hashed here. Throws InternalError while the extent is being read or written.
  [[nodiscard]] ExtentTransfer write(std::size_t index, std::span<std::byte> buffer,
                                     std::optional<std::uint64_t> checksum = std::nullopt);
  /// Throws ChecksumError, naming the extent, unless `actual` is the checksum of its last write.
  void verify(std::size_t index, std::uint64_t actual) const;
  /// Waits until nothing is under way, well or badly.
  void wait_ended() noexcept;

  [[nodiscard]] ExtentState state(std::size_t index) const;
  /// How many writes of the extent the disk has acknowledged.
  [[nodiscard]] std::uint64_t num_writes(std::size_t index) const;
  [[nodiscard]] const ExtentTable& table() const noexcept { return table_; }
  [[nodiscard]] IoEngine& engine() noexcept { return engine_; }

 private:
  struct Status {
    ExtentState state = ExtentState::kEmpty;
    int readers = 0;
    std::uint64_t checksum = 0;
    std::uint64_t num_writes = 0;
  };
  [[nodiscard]] std::string describe(std::size_t index) const;
  void check_buffer(std::size_t index, std::span<const std::byte> buffer) const;
  void end_read(std::size_t index) noexcept;
  void end_write(std::size_t index, std::uint64_t checksum, bool succeeded) noexcept;

  ExtentTable table_;
  IoEngine& engine_;
  pid_t process_;
  mutable std::mutex status_mutex_;  ///< Guards everything below.
  ForkSafeCondition under_way_changed_;
  std::size_t under_way_ = 0;
  std::vector<Status> status_;
};

}  // namespace pannier
