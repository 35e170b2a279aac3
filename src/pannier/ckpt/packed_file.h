// A file written from front to back through the aligned buffers of a FileMover: what comes is packed without gaps, and
// whole buffers are on their way to the disk while the next is filled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>

#include "pannier/ckpt/file_mover.h"

namespace pannier::ckpt {

/// One file being written. One thread.
class PackedFile {
 public:
  /// Sets `nbytes` aside on the disk, which all that comes must add up to. `mover` must outlive it, and have more
  /// buffers than files that are written at one time. Throws IoError.
  PackedFile(FileMover& mover, OwnedFd fd, std::string path, std::uint64_t nbytes);
  /// Waits for what is under way.
  ~PackedFile();
  PackedFile(const PackedFile&) = delete;
  PackedFile& operator=(const PackedFile&) = delete;

  /// The bytes that follow. Throws IoError, also of an earlier call's.
  void append(std::span<const std::byte> bytes);
  /// Writes what is left, cuts the file to its size and makes it durable.
  void finish();

 private:
  void send(std::size_t nbytes);
  void take_results(bool wait);

  FileMover& mover_;
  MovedFile file_;
  std::uint64_t nbytes_;
  std::uint64_t sent_ = 0;
  std::size_t filled_ = 0;  ///< Of the buffer.
  StagingBuffer buffer_;
  std::deque<IoTransferPtr> under_way_;
};

}  // namespace pannier::ckpt
