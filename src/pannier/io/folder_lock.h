// One run at a time in a folder. Whether a run is alive is decided by the kernel's lock on a small file alone; what the
// file says (process, host, start) is only for the message that a second run gets. The kernel's boot id is part of the
// file's name, so that machines that share a folder do not refuse each other, and containers of one machine do.
// Whoever gets the lock removes what dead runs left.
#pragma once

#include <memory>
#include <string>

namespace pannier {

/// Options of FolderLock.
struct FolderLockOptions {
  /// How long to try: the kernel holds the lock of a killed process until its writes have ended.
  double wait_seconds = 5.0;
  /// Throws ConfigError when a field makes no sense.
  void validate() const;
};

/// Holds a folder for this process, which may hold it more than once: the last holder lets go. Forked children hold
/// nothing. Move-only. Creation is thread-safe. Of the ranks of one node, the first takes the lock for all.
class FolderLock {
 public:
  /// Throws IoError(EBUSY) naming folder and the other run's process, host and start when another run holds it; IoError
  /// when the folder is missing, is a file or cannot be written to.
  explicit FolderLock(const std::string& folder, const FolderLockOptions& options = {});
  FolderLock(FolderLock&&) noexcept = default;
  FolderLock& operator=(FolderLock&&) noexcept = default;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() = default;

  /// Lets go now.
  void release() noexcept { held_.reset(); }
  /// Absolute; there while the lock is held.
  [[nodiscard]] const std::string& lock_path() const;
  /// How many files of dead runs were removed when this process took the lock.
  [[nodiscard]] int leftovers_removed() const;

 private:
  struct Held;
  struct Registry;
  /// Shared by the locks of this process on one folder: only the kernel knows the file, and it counts no holders.
  std::shared_ptr<Held> held_;
};

/// A name in `folder` for a scratch file of this process, such as a later run recognises as left over: it holds boot
/// id, process and start. `rank` and a count of this process tell several apart.
[[nodiscard]] std::string scratch_path(const std::string& folder, int rank);

/// Whether `name` (without folder) is a scratch file's whose process does not run any more.
[[nodiscard]] bool is_dead_scratch_name(const std::string& name);

}  // namespace pannier
