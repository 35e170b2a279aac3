// A buffer that ends at an unreadable page, with guard bytes before it: a kernel that reads or writes past the end
// crashes, and one that writes before the beginning is seen.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace pannier::testing {

/// Owns `nbytes` bytes, zero-filled. Its start has whatever alignment the size leaves.
class FencedBuffer {
 public:
  explicit FencedBuffer(std::size_t nbytes) : nbytes_(nbytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (nbytes + kGuardBytes + page - 1) / page * page;
    mapped_nbytes_ = usable + page;
    mapping_ = mmap(nullptr, mapped_nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED || mprotect(static_cast<char*>(mapping_) + usable, page, PROT_NONE) != 0) {
      throw std::runtime_error("no fenced buffer");
    }
    begin_ = static_cast<unsigned char*>(mapping_) + usable - nbytes;
    std::fill(begin_ - kGuardBytes, begin_, kGuard);
  }
  FencedBuffer(const FencedBuffer& other) : FencedBuffer(other.nbytes_) {
    if (nbytes_ > 0) {
      std::memcpy(begin_, other.begin_, nbytes_);
    }
  }
  FencedBuffer& operator=(const FencedBuffer&) = delete;
  ~FencedBuffer() { munmap(mapping_, mapped_nbytes_); }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(begin_);
  }
  std::size_t nbytes() const { return nbytes_; }
  bool is_guard_intact() const {
    return std::all_of(begin_ - kGuardBytes, begin_, [](unsigned char byte) { return byte == kGuard; });
  }
  bool operator==(const FencedBuffer& other) const {
    return nbytes_ == other.nbytes_ && (nbytes_ == 0 || std::memcmp(begin_, other.begin_, nbytes_) == 0);
  }

 private:
  static constexpr std::size_t kGuardBytes = 64;
  static constexpr unsigned char kGuard = 0xA5;

  std::size_t nbytes_;
  std::size_t mapped_nbytes_ = 0;
  void* mapping_ = nullptr;
  unsigned char* begin_ = nullptr;
};

}  // namespace pannier::testing
