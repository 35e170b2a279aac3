// Anonymous memory, mapped alone. It lies between two inaccessible guard pages, so that the kernel merges it with
// nothing, counts it by itself in smaps, and never lets a huge page reach beyond its end; a stray write past either end
// faults. Mappings of at least 2 MiB begin on a multiple of 2 MiB, so that huge pages cover them from the start. Forked
// children do not inherit it: their copies on write would double it.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace pannier {

/// The size of a transparent huge page on x86 and on ARM with small pages.
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

/// Rounds up to the page. Sizes that no address space holds stay beyond it.
[[nodiscard]] std::size_t round_up_to_page(std::size_t nbytes) noexcept;

/// Owns the mapping; unmaps on destruction. Move-only. Not thread-safe.
class GuardedMapping {
 public:
  GuardedMapping() noexcept = default;
  /// Maps `nbytes` rounded up to the page, touching nothing. Throws std::system_error when the kernel refuses.
  explicit GuardedMapping(std::size_t nbytes);
  GuardedMapping(GuardedMapping&& other) noexcept;
  GuardedMapping& operator=(GuardedMapping&& other) noexcept;
  GuardedMapping(const GuardedMapping&) = delete;
  GuardedMapping& operator=(const GuardedMapping&) = delete;
  ~GuardedMapping();

  /// Null when empty.
  [[nodiscard]] std::byte* begin() const noexcept { return begin_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] std::size_t mapped_bytes() const noexcept { return mapped_bytes_; }

 private:
  void unmap() noexcept;

  std::byte* begin_ = nullptr;
  std::size_t nbytes_ = 0;
  std::size_t mapped_bytes_ = 0;
  pid_t process_ = 0;
};

}  // namespace pannier
