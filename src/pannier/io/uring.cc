#include "pannier/io/uring.h"

#include <fmt/format.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "pannier/base/error.h"

namespace pannier {
namespace {

unsigned load_acquire(unsigned* shared) noexcept {
  return std::atomic_ref<unsigned>(*shared).load(std::memory_order_acquire);
}

void store_release(unsigned* shared, unsigned value) noexcept {
  std::atomic_ref<unsigned>(*shared).store(value, std::memory_order_release);
}

// From the kindest to the oldest kernel: one thread uses the ring and runs the kernel's part of the work itself; no
// interrupts for it; nothing special.
constexpr std::array kSetupFlags = {
    IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_R_DISABLED | IORING_SETUP_COOP_TASKRUN,
    0U,
};

}  // namespace

Uring::Uring(unsigned num_requests) : process_(::getpid()) {
  io_uring_params params{};
  for (const unsigned flags : kSetupFlags) {
    params = {};
    params.flags = flags;
    fd_ = OwnedFd(static_cast<int>(::syscall(__NR_io_uring_setup, num_requests, &params)));
    if (fd_.is_open() || errno != EINVAL) {
      break;
    }
  }
  if (!fd_.is_open()) {
    throw IoError("set io_uring up", errno);
  }
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_NODROP) == 0) {
    throw IoError("set io_uring up: the kernel is too old", ENOSYS);
  }
  starts_disabled_ = (params.flags & IORING_SETUP_R_DISABLED) != 0;
  num_entries_ = params.sq_entries;
  map(std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
               params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
      params.sq_entries * sizeof(io_uring_sqe));
  const auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
  request_head_ = at(params.sq_off.head);
  request_tail_ = at(params.sq_off.tail);
  request_mask_ = *at(params.sq_off.ring_mask);
  request_order_ = at(params.sq_off.array);
  result_head_ = at(params.cq_off.head);
  result_tail_ = at(params.cq_off.tail);
  result_mask_ = *at(params.cq_off.ring_mask);
  results_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
}

Uring::~Uring() { unmap(); }

void Uring::map(std::size_t ring_nbytes, std::size_t requests_nbytes) {
  const auto map_one = [this](std::size_t nbytes, std::uint64_t what) {
    void* const address =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), static_cast<off_t>(what));
    if (address == MAP_FAILED) {
      const int error = errno;
      unmap();
      throw IoError("map io_uring", error);
    }
    ::madvise(address, nbytes, MADV_DONTFORK);
    return address;
  };
  rings_ = static_cast<std::byte*>(map_one(ring_nbytes, IORING_OFF_SQ_RING));
  rings_nbytes_ = ring_nbytes;
  requests_ = static_cast<io_uring_sqe*>(map_one(requests_nbytes, IORING_OFF_SQES));
  requests_nbytes_ = requests_nbytes;
}

void Uring::unmap() noexcept {
  // In a forked child the addresses may hold something else by now.
  if (process_ == ::getpid()) {
    if (requests_ != nullptr) {
      ::munmap(requests_, requests_nbytes_);
    }
    if (rings_ != nullptr) {
      ::munmap(rings_, rings_nbytes_);
    }
  }
  requests_ = nullptr;
  rings_ = nullptr;
}

int Uring::register_buffers(std::span<const iovec> buffers) noexcept {
  return ::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_BUFFERS, buffers.data(),
                   static_cast<unsigned>(buffers.size())) == 0
             ? 0
             : errno;
}

int Uring::register_files(std::span<const int> fds) noexcept {
  return ::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_FILES, fds.data(),
                   static_cast<unsigned>(fds.size())) == 0
             ? 0
             : errno;
}

void Uring::unregister_buffers() noexcept {
  ::syscall(__NR_io_uring_register, fd_.get(), IORING_UNREGISTER_BUFFERS, nullptr, 0);
  ::syscall(__NR_io_uring_register, fd_.get(), IORING_UNREGISTER_FILES, nullptr, 0);
}

int Uring::start() noexcept {
  if (!starts_disabled_) {
    return 0;
  }
  return ::syscall(__NR_io_uring_register, fd_.get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == 0 ? 0 : errno;
}

io_uring_sqe& Uring::next_request() {
  const unsigned tail = *request_tail_;
  PANNIER_CHECK(tail - load_acquire(request_head_) < num_entries_,
                fmt::format("a ring of {} requests has no free one", num_entries_));
  const unsigned index = tail & request_mask_;
  request_order_[index] = index;
  std::memset(&requests_[index], 0, sizeof(io_uring_sqe));
  // The kernel looks at the tail in submit_and_wait only, when the caller has filled the request.
  store_release(request_tail_, tail + 1);
  return requests_[index];
}

int Uring::submit_and_wait(unsigned min_results) noexcept {
  const unsigned unsent = *request_tail_ - load_acquire(request_head_);
  const auto sent = ::syscall(__NR_io_uring_enter, fd_.get(), unsent, min_results, IORING_ENTER_GETEVENTS, nullptr, 0);
  return sent >= 0 ? 0 : errno;
}

std::optional<std::uint64_t> Uring::take_back() noexcept {
  const unsigned tail = *request_tail_;
  if (tail == load_acquire(request_head_)) {
    return std::nullopt;
  }
  store_release(request_tail_, tail - 1);
  return requests_[(tail - 1) & request_mask_].user_data;
}

std::optional<UringResult> Uring::next_result() noexcept {
  const unsigned head = *result_head_;
  if (head == load_acquire(result_tail_)) {
    return std::nullopt;
  }
  const io_uring_cqe& result = results_[head & result_mask_];
  const UringResult copy{result.user_data, result.res};
  store_release(result_head_, head + 1);
  return copy;
}

}  // namespace pannier
