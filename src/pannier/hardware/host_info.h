// What this machine has and what this process may use of it: cores, instruction sets, memory and limits. Every file is
// read below a root folder, so that tests can show it any machine.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "pannier/hardware/cgroup.h"

namespace pannier {

/// Memory of the machine and the limits on this process. Sizes that cannot be read are kUnlimitedBytes.
struct MemoryInfo {
  std::size_t total_bytes = kUnlimitedBytes;               ///< MemTotal.
  std::size_t available_bytes = kUnlimitedBytes;           ///< MemAvailable: free, or free after dropping page cache.
  std::size_t swap_bytes = 0;                              ///< SwapTotal.
  std::size_t memlock_limit_bytes = kUnlimitedBytes;       ///< RLIMIT_MEMLOCK.
  std::size_t address_space_left_bytes = kUnlimitedBytes;  ///< RLIMIT_AS less what is mapped.
  CgroupMemory cgroup;
};

/// How the kernel backs memory by huge pages without being asked page by page.
enum class ThpMode { kUnknown, kNever, kMadvise, kAlways };

/// One NUMA node.
struct NumaNode {
  int id = 0;
  int num_cores = 0;
  std::size_t total_bytes = 0;
  std::size_t free_bytes = 0;
};

/// What this machine has and what this process may use of it.
struct HostInfo {
  std::string cpu_model;                      ///< As /proc/cpuinfo names it; may be empty.
  std::vector<std::string> instruction_sets;  ///< The ones that matter to us, by the kernel's names, sorted.
  int affinity_cores = 1;                     ///< Logical cores that the affinity mask allows.
  double cpu_quota = 0.0;                     ///< Cores that cgroups allow; infinity without a limit.
  int usable_cores = 1;                       ///< Whole cores within both, at least one.
  MemoryInfo memory;
  std::vector<NumaNode> numa_nodes;  ///< Those that this process may allocate from; empty when unknown.
  std::size_t huge_page_bytes = 0;   ///< Of transparent huge pages; 0 when there are none.
  ThpMode thp_mode = ThpMode::kUnknown;
  std::string kernel_version;
  bool in_container = false;
};

/// Looks at the machine. Never throws for files that are missing or odd: what is not known limits nothing.
[[nodiscard]] HostInfo probe_host(const std::filesystem::path& root = "/");

/// The memory part of it alone: a few small files, cheap enough to ask before each large allocation.
[[nodiscard]] MemoryInfo probe_memory(const std::filesystem::path& root = "/");

/// What this process can still allocate without being killed or refused: the least of machine, cgroup and address
/// space.
[[nodiscard]] std::size_t host_bytes_available(const MemoryInfo& memory) noexcept;
[[nodiscard]] inline std::size_t host_bytes_available(const HostInfo& host) noexcept {
  return host_bytes_available(host.memory);
}

}  // namespace pannier
