#include "pannier/ckpt/file_mover.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/disk_file.h"
#include "pannier/io/engines.h"

namespace pannier::ckpt {
namespace {

constexpr std::size_t kMostBufferBytes = std::size_t{8} << 20;
constexpr std::size_t kLeastBufferBytes = std::size_t{64} << 10;
constexpr std::uint64_t kBuffersInFiles = 160;  // With eight buffers, a twentieth of the files.

bool is_direct(int fd) noexcept { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

void use_page_cache(int fd) noexcept { static_cast<void>(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_DIRECT)); }

IoError failure(const char* verb, const MovedFile& file, std::size_t nbytes, std::uint64_t offset, int error) {
  return {fmt::format("{} '{}': {} bytes at offset {}", verb, file.path, nbytes, offset), error};
}

}  // namespace

FileMoverOptions FileMoverOptions::for_files_of(std::uint64_t nbytes) noexcept {
  const std::uint64_t wanted = nbytes / kBuffersInFiles / kIoAlignment * kIoAlignment;
  return {.buffer_nbytes = std::clamp<std::uint64_t>(wanted, kLeastBufferBytes, kMostBufferBytes)};
}

void prefer_direct(int fd) noexcept { static_cast<void>(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_DIRECT)); }

void set_space_aside(const MovedFile& file, std::uint64_t nbytes) {
  while (nbytes > 0 && ::fallocate(file.fd.get(), 0, 0, static_cast<off_t>(nbytes)) != 0) {
    if (errno == EOPNOTSUPP || errno == ENOSYS) {
      return;
    }
    if (errno != EINTR) {
      throw IoError(fmt::format("write '{}': {} bytes wanted", file.path, nbytes), errno);
    }
  }
}

FileMover::FileMover(HostMemory& memory, const FileMoverOptions& options)
    : buffers_(memory,
               {.buffer_count = options.num_buffers, .buffer_size = options.buffer_nbytes, .owner = "checkpoint"}) {
  for (int i = 0; i < options.num_threads; ++i) {
    threads_.emplace_back([this] { work(); });
  }
}

FileMover::~FileMover() {
  {
    const std::lock_guard lock(jobs_mutex_);
    is_closed_ = true;
  }
  jobs_changed_.notify_all();
  for (auto& thread : threads_) {
    thread.join();
  }
}

IoTransferPtr FileMover::push(Job job) {
  IoTransferPtr transfer = job.transfer;
  {
    const std::lock_guard lock(jobs_mutex_);
    jobs_.push_back(std::move(job));
  }
  jobs_changed_.notify_one();
  return transfer;
}

IoTransferPtr FileMover::write(const MovedFile& file, std::uint64_t offset, StagingBuffer buffer, std::size_t nbytes) {
  PANNIER_CHECK(offset % kIoAlignment == 0 && nbytes % kIoAlignment == 0,
                fmt::format("{} bytes at offset {} are not aligned", nbytes, offset));
  const auto memory = buffer.data().first(nbytes);
  return push({true, &file, offset, memory, nbytes, std::move(buffer), std::make_shared<IoTransfer>(nbytes, nullptr)});
}

IoTransferPtr FileMover::read(const MovedFile& file, std::uint64_t offset, std::span<std::byte> to,
                              std::size_t needed) {
  PANNIER_CHECK(offset % kIoAlignment == 0 && to.size() % kIoAlignment == 0 && needed <= to.size(),
                fmt::format("{} of {} bytes at offset {} are not aligned", needed, to.size(), offset));
  return push({false, &file, offset, to, needed, {}, std::make_shared<IoTransfer>(needed, nullptr)});
}

void FileMover::work() {
  detail::block_signals();
  while (true) {
    Job job;
    {
      std::unique_lock lock(jobs_mutex_);
      jobs_changed_.wait(lock, [this] { return is_closed_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    try {
      run(job);
    } catch (...) {
      job.transfer->fail(std::current_exception());
    }
    job.buffer.give_back();
    job.transfer->advance(job.needed);
  }
}

// A result that is short is gone on with from its last aligned byte.
void FileMover::run(const Job& job) {
  const int fd = job.file->fd.get();
  const char* const verb = job.is_write ? "write" : "read";
  std::size_t moved = 0;
  while (moved < job.needed) {
    const auto left = job.memory.subspan(moved);
    const std::uint64_t offset = job.offset + moved;
    const auto at = static_cast<off_t>(offset);
    const ssize_t result =
        job.is_write ? ::pwrite(fd, left.data(), left.size(), at) : ::pread(fd, left.data(), left.size(), at);
    if (result < 0 && errno == EINTR) {
      continue;
    }
    if (result < 0 && errno == EINVAL && is_direct(fd)) {
      use_page_cache(fd);
      continue;
    }
    const std::size_t done = result < 0 ? 0 : static_cast<std::size_t>(result);
    if (moved + done >= job.needed) {
      return;
    }
    const std::size_t aligned = (moved + done) / kIoAlignment * kIoAlignment;
    if (aligned == moved) {
      throw failure(verb, *job.file, left.size(), offset, result < 0 ? errno : job.is_write ? ENOSPC : EIO);
    }
    moved = aligned;
  }
}

}  // namespace pannier::ckpt
