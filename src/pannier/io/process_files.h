// What the operating system keeps for this process and must not keep longer: file descriptors that a forked child (a
// data loader's worker, say) would otherwise hold open for its whole life, and names in folders that a signal would
// otherwise leave behind. Both are kept in tables of fixed size that need no lock, since a signal handler and a forked
// child may take none.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace pannier {

/// Owns a file descriptor, which forked children close as they start. In such a child the object does nothing.
/// Move-only. One thread at a time.
class OwnedFd {
 public:
  OwnedFd() noexcept = default;
  /// Takes `fd` over; negative means none.
  explicit OwnedFd(int fd) noexcept;
  OwnedFd(OwnedFd&& other) noexcept;
  OwnedFd& operator=(OwnedFd&& other) noexcept;
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() { reset(); }

  /// Closes it now.
  void reset() noexcept;
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool is_open() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
  std::size_t slot_ = 0;
  pid_t process_ = 0;
};

/// Owns a name in a folder: removes it when destroyed, at exit(), and in remove_named_files(). Move-only. One thread at
/// a time. In a forked child it does nothing.
class OwnedName {
 public:
  OwnedName() noexcept = default;
  /// `path` must be absolute. It need not exist yet, so that there is no moment at which it is not guarded. Throws
  /// ConfigError when it is too long, or when this process holds too many.
  explicit OwnedName(const std::string& path);
  OwnedName(OwnedName&& other) noexcept;
  OwnedName& operator=(OwnedName&& other) noexcept;
  OwnedName(const OwnedName&) = delete;
  OwnedName& operator=(const OwnedName&) = delete;
  ~OwnedName() { remove(); }

  /// Removes the name now; one that is gone already is as good.
  void remove() noexcept;
  /// Leaves the name to whoever has it.
  void release() noexcept;

 private:
  std::size_t slot_ = 0;
  pid_t process_ = 0;  ///< 0: owns none.
};

/// Unlinks every name that an OwnedName of this process holds. Safe in a signal handler. A forked child that calls it
/// removes nothing.
void remove_named_files() noexcept;

/// For SIGINT, SIGTERM and SIGHUP, where the process has no handler of its own: removes the named files, then lets the
/// signal do what it does by default. Where there is a handler already (Python has one for SIGINT), it stays.
void remove_named_files_on_signals();

}  // namespace pannier
