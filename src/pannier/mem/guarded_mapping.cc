#include "pannier/mem/guarded_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <system_error>
#include <utility>

namespace pannier {
namespace {

constexpr std::size_t kLargestMapping = std::numeric_limits<std::size_t>::max() / 4;

std::size_t page_bytes() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

std::size_t aligned(std::uintptr_t address, std::size_t alignment) noexcept {
  return (address + alignment - 1) / alignment * alignment;
}

}  // namespace

std::size_t round_up_to_page(std::size_t nbytes) noexcept {
  return nbytes > kLargestMapping ? nbytes : aligned(nbytes, page_bytes());
}

GuardedMapping::GuardedMapping(std::size_t nbytes) {
  if (nbytes == 0) {
    return;
  }
  const auto page = page_bytes();
  const auto mapped = round_up_to_page(nbytes);
  const auto alignment = mapped >= kHugePageBytes ? kHugePageBytes : page;
  if (mapped > kLargestMapping) {
    throw std::system_error(ENOMEM, std::generic_category(), "mmap");
  }
  // Reserve address space for the mapping, two guards and the way to the next boundary; then give the ends back.
  const auto reserved = mapped + 2 * page + (alignment - page);
  void* const space = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap");
  }
  auto* const first = static_cast<std::byte*>(space);
  const auto address = reinterpret_cast<std::uintptr_t>(space);
  auto* const begin = first + (aligned(address + page, alignment) - address);
  const auto front = static_cast<std::size_t>(begin - page - first);
  const auto back = reserved - front - mapped - 2 * page;
  if (front > 0) {
    ::munmap(first, front);
  }
  if (back > 0) {
    ::munmap(begin + mapped + page, back);
  }
  begin_ = begin;
  nbytes_ = nbytes;
  mapped_bytes_ = mapped;
  process_ = ::getpid();
  if (::mprotect(begin, mapped, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    unmap();
    throw std::system_error(error, std::generic_category(), "mprotect");
  }
  ::madvise(begin, mapped, MADV_DONTFORK);  // Where it is refused, children share the pages until someone writes.
}

GuardedMapping::GuardedMapping(GuardedMapping&& other) noexcept
    : begin_(std::exchange(other.begin_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)),
      process_(other.process_) {}

GuardedMapping& GuardedMapping::operator=(GuardedMapping&& other) noexcept {
  if (this != &other) {
    unmap();
    begin_ = std::exchange(other.begin_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
    process_ = other.process_;
  }
  return *this;
}

GuardedMapping::~GuardedMapping() { unmap(); }

void GuardedMapping::unmap() noexcept {
  // In a forked child the addresses may hold something else by now.
  if (begin_ != nullptr && process_ == ::getpid()) {
    const auto page = page_bytes();
    ::munmap(begin_ - page, mapped_bytes_ + 2 * page);
  }
  begin_ = nullptr;
  nbytes_ = 0;
  mapped_bytes_ = 0;
}

}  // namespace pannier
