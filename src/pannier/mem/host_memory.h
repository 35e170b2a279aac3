// The account of host memory: who holds how much, what the user allows, and what the machine has left. Memory is
// claimed before it is touched, so that a request that cannot be met ends in an exception that names its owner, never
// in a kill by the kernel halfway.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>

namespace pannier {

class HostMemory;

/// Options of HostMemory.
struct HostMemoryOptions {
  /// What all claims together may reach.
  std::size_t budget_bytes = std::numeric_limits<std::size_t>::max();
  /// Left free on the machine, for page tables and everything that is not ours.
  std::size_t headroom_bytes = std::size_t{64} << 20;
  /// Says how many bytes the machine has left; empty asks the kernel and the cgroup. Must be thread-safe.
  std::function<std::size_t()> bytes_available = nullptr;
};

/// Bytes that are resident now, and their maximum so far.
struct HostUsage {
  std::size_t current_bytes = 0;
  std::size_t peak_bytes = 0;
};

/// A snapshot of a HostMemory: the sum, and the same for each owner (owners that gave everything back stay listed).
struct HostMemoryStats {
  HostUsage total;
  std::map<std::string, HostUsage> by_owner;
};

/// A right to `nbytes` of host memory, given back on destruction; the HostMemory must outlive it. Move-only. One thread
/// at a time. In a forked child it does nothing.
class HostClaim {
 public:
  HostClaim() noexcept = default;
  HostClaim(HostClaim&& other) noexcept;
  HostClaim& operator=(HostClaim&& other) noexcept;
  HostClaim(const HostClaim&) = delete;
  HostClaim& operator=(const HostClaim&) = delete;
  ~HostClaim();

  /// Tells the account that `nbytes` more of the claim have become resident, which counts them as used.
  void settle(std::size_t nbytes);

  /// Throws OutOfMemoryError when what is still to be touched has meanwhile been taken by another process.
  void recheck() const;

  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] const std::string& owner() const noexcept { return owner_; }

 private:
  friend class HostMemory;
  HostClaim(HostMemory& memory, std::string owner, std::size_t nbytes);
  void give_back() noexcept;

  HostMemory* memory_ = nullptr;  ///< Null when empty.
  std::string owner_;
  std::size_t nbytes_ = 0;
  std::size_t settled_bytes_ = 0;
  pid_t process_ = 0;  ///< Who claimed.
};

/// Counts host memory by owner and guards the budget. Thread-safe. Must outlive its claims.
class HostMemory {
 public:
  explicit HostMemory(HostMemoryOptions options = {});
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// Sets `nbytes` aside for `owner`, touching nothing. Throws OutOfMemoryError("host", owner, wanted, free) when the
  /// budget or the machine has less left.
  [[nodiscard]] HostClaim claim(const std::string& owner, std::size_t nbytes);

  [[nodiscard]] HostMemoryStats stats() const;
  [[nodiscard]] std::size_t current_bytes() const;
  [[nodiscard]] std::size_t peak_bytes() const;
  /// What a claim could get now: the least of budget and machine, less what is claimed and not yet touched.
  [[nodiscard]] std::size_t free_bytes() const;
  /// Lowers every peak to what is current.
  void reset_peak();
  [[nodiscard]] std::size_t budget_bytes() const noexcept { return options_.budget_bytes; }

 private:
  friend class HostClaim;
  struct Room {
    std::uint64_t changes = 0;
    std::size_t machine_bytes = 0;
  };
  [[nodiscard]] Room look_at_machine() const;
  [[nodiscard]] std::size_t free_bytes_locked(std::size_t machine_bytes) const;
  void settle(const std::string& owner, std::size_t nbytes);
  void recheck(const std::string& owner, std::size_t untouched_bytes) const;
  void give_back(const std::string& owner, std::size_t settled_bytes, std::size_t untouched_bytes) noexcept;

  HostMemoryOptions options_;
  mutable std::mutex account_mutex_;  ///< Guards everything below.
  HostMemoryStats stats_;
  std::size_t untouched_bytes_ = 0;  ///< Claimed, not resident yet: the machine's figure still holds them as free.
  std::uint64_t changes_ = 0;        ///< Tells whether a figure of the machine is older than the account.
};

}  // namespace pannier
