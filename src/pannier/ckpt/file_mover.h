// What large files are read and written with: a bounded number of aligned buffers, and a few threads that move them to
// and from the disk, several at one time, past the page cache where the file system allows that. So a stream through
// any number of files runs at the disk's own rate, and the page cache stays as it was.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pannier/io/io_transfer.h"
#include "pannier/io/process_files.h"
#include "pannier/io/staging.h"

namespace pannier::ckpt {

/// A file that a FileMover works on. It must stay until every transfer has ended.
struct MovedFile {
  OwnedFd fd;
  std::string path;  ///< For messages.
};

/// Options of FileMover.
struct FileMoverOptions {
  std::size_t buffer_nbytes = std::size_t{8} << 20;  ///< Of one buffer, and so of one request.
  std::size_t num_buffers = 8;
  int num_threads = 8;  ///< Requests with the disk at one time.
  /// For so many bytes of files: buffers of 8 MiB, smaller ones where these would be much beside them. A pure function.
  [[nodiscard]] static FileMoverOptions for_files_of(std::uint64_t nbytes) noexcept;
  /// What the buffers take of host memory.
  [[nodiscard]] std::size_t nbytes() const noexcept { return buffer_nbytes * num_buffers; }
};

/// Moves buffers. Thread-safe. Destruction waits for what is under way. In a forked child it must not be used.
class FileMover {
 public:
  /// Throws OutOfMemoryError where host memory does not suffice. `memory` must outlive it.
  FileMover(HostMemory& memory, const FileMoverOptions& options);
  ~FileMover();
  FileMover(const FileMover&) = delete;
  FileMover& operator=(const FileMover&) = delete;

  /// Waits for a free buffer.
  [[nodiscard]] StagingBuffer acquire() { return buffers_.acquire(); }
  [[nodiscard]] std::size_t buffer_nbytes() const noexcept { return buffers_.buffer_nbytes(); }
  [[nodiscard]] std::size_t num_buffers() const noexcept { return buffers_.buffer_count(); }
  /// Starts to write a buffer's first `nbytes`, a multiple of kIoAlignment as `offset` is, and gives the buffer back at
  /// the end.
  [[nodiscard]] IoTransferPtr write(const MovedFile& file, std::uint64_t offset, StagingBuffer buffer,
                                    std::size_t nbytes);
  /// Starts to read to aligned memory, which must stay. At least `needed` bytes must come: the file may end there.
  [[nodiscard]] IoTransferPtr read(const MovedFile& file, std::uint64_t offset, std::span<std::byte> to,
                                   std::size_t needed);

 private:
  struct Job {
    bool is_write = false;
    const MovedFile* file = nullptr;
    std::uint64_t offset = 0;
    std::span<std::byte> memory;
    std::size_t needed = 0;
    StagingBuffer buffer;
    IoTransferPtr transfer;
  };
  [[nodiscard]] IoTransferPtr push(Job job);
  void work();
  static void run(const Job& job);

  StagingPool buffers_;
  std::mutex jobs_mutex_;  ///< Guards the two below.
  std::deque<Job> jobs_;
  bool is_closed_ = false;
  std::condition_variable jobs_changed_;
  std::vector<std::thread> threads_;
};

/// Asks for transfers past the page cache; a file system that can't goes through it.
void prefer_direct(int fd) noexcept;

/// Sets space aside for a file to be written. Throws IoError naming it where the disk has less, or the file may not be
/// so large.
void set_space_aside(const MovedFile& file, std::uint64_t nbytes);

}  // namespace pannier::ckpt
