// What the cgroups around this process allow, in version 1, version 2 and mixed systems. A limit may sit on any
// ancestor, so each level from our own group up to the mount is looked at and the tightest one counts.
#pragma once

#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>

namespace pannier {

/// Stands for "no limit" and "unknown" in sizes.
inline constexpr std::size_t kUnlimitedBytes = std::numeric_limits<std::size_t>::max();

/// The memory of the cgroup with the least room left.
struct CgroupMemory {
  std::size_t limit_bytes = kUnlimitedBytes;  ///< memory.max or memory.high (v1: memory.limit_in_bytes).
  std::size_t current_bytes = 0;              ///< Counted against the limit, page cache included.
  std::size_t reclaimable_bytes = 0;          ///< Inactive page cache, which the kernel drops before it kills.
  std::string folder;                         ///< Where the limit was read; empty without one.

  /// What may still be allocated below the limit.
  [[nodiscard]] std::size_t room_bytes() const noexcept;
};

/// What the cgroups allow.
struct CgroupLimits {
  CgroupMemory memory;
  double cpu_quota = std::numeric_limits<double>::infinity();  ///< In cores.
};

/// Reads /proc and /sys below `root`. What cannot be read limits nothing.
[[nodiscard]] CgroupLimits probe_cgroup(const std::filesystem::path& root = "/");

/// The memory half of the above.
[[nodiscard]] CgroupMemory probe_cgroup_memory(const std::filesystem::path& root = "/");

}  // namespace pannier
