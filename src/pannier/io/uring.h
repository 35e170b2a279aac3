// One io_uring: two rings of memory shared with the kernel, one of requests and one of results. By system calls of our
// own and the kernel's header, not by liburing: the part needed here is this small, every machine that compiles has the
// header, and the packed library needs nothing that its machine may lack.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "pannier/io/process_files.h"

struct io_uring_sqe;
struct io_uring_cqe;

namespace pannier {

/// What became of a request.
struct UringResult {
  std::uint64_t tag = 0;
  int result = 0;
};

/// Owns the ring. Made by any thread; from start() on used by one thread. In a forked child it does nothing.
class Uring {
 public:
  /// A ring for `num_requests` at one time. Throws IoError with the kernel's reason when it refuses.
  explicit Uring(unsigned num_requests);
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;
  ~Uring();

  /// Pins memory for requests that name it by index. 0, or an errno value.
  int register_buffers(std::span<const iovec> buffers) noexcept;
  /// Registers descriptors for requests that name them by index. 0, or an errno value.
  int register_files(std::span<const int> fds) noexcept;
  /// Lets go of the memory before the ring ends, which it does in its own time.
  void unregister_buffers() noexcept;
  /// Makes the calling thread the one that uses the ring. 0, or an errno value.
  int start() noexcept;

  /// The next free request, zeroed; there is one while fewer than `num_requests` are under way.
  [[nodiscard]] io_uring_sqe& next_request();
  /// Hands the requests over and waits for `min_results`. 0, or an errno value; after one, requests may be unsent.
  int submit_and_wait(unsigned min_results) noexcept;
  /// Takes back a request that could not be handed over, and gives its tag; nothing when all were.
  std::optional<std::uint64_t> take_back() noexcept;
  /// The next result, if there is one.
  std::optional<UringResult> next_result() noexcept;

 private:
  void map(std::size_t ring_nbytes, std::size_t requests_nbytes);
  void unmap() noexcept;

  OwnedFd fd_;
  pid_t process_;
  bool starts_disabled_ = false;
  unsigned num_entries_ = 0;
  std::byte* rings_ = nullptr;
  std::size_t rings_nbytes_ = 0;
  io_uring_sqe* requests_ = nullptr;
  std::size_t requests_nbytes_ = 0;
  io_uring_cqe* results_ = nullptr;
  unsigned* request_head_ = nullptr;  ///< The kernel's; read with acquire.
  unsigned* request_tail_ = nullptr;  ///< Ours; written with release.
  unsigned request_mask_ = 0;
  unsigned* request_order_ = nullptr;
  unsigned* result_head_ = nullptr;  ///< Ours.
  unsigned* result_tail_ = nullptr;  ///< The kernel's.
  unsigned result_mask_ = 0;
};

}  // namespace pannier
