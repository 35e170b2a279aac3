#include "pannier/hardware/host_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "pannier/base/units.h"

namespace pannier {
namespace {

// Below this, io_uring cannot register staging buffers of a useful size.
constexpr std::size_t kEnoughLockedBytes = std::size_t{256} << 20;

std::string size_or(std::size_t nbytes, const char* otherwise) {
  return nbytes == kUnlimitedBytes ? otherwise : format_bytes(nbytes);
}

ReportLine cores_line(const HostInfo& host) {
  const auto quota = std::isinf(host.cpu_quota) ? std::string("no quota") : fmt::format("quota {:.2f}", host.cpu_quota);
  ReportLine line{"cores", fmt::format("{} usable (affinity {}, {})", host.usable_cores, host.affinity_cores, quota),
                  ""};
  if (host.usable_cores == 1) {
    line.advice = "with one core, updates on the host will be slow; check taskset, OMP_PROC_BIND and the CPU quota";
  }
  return line;
}

ReportLine instruction_line(const HostInfo& host) {
  const auto& sets = host.instruction_sets;
  const auto has = [&](const char* name) { return std::find(sets.begin(), sets.end(), name) != sets.end(); };
  ReportLine line{"instruction sets", sets.empty() ? "unknown" : fmt::format("{}", fmt::join(sets, " ")), ""};
  if (!sets.empty() && !has("asimd") && !(has("avx2") && has("fma"))) {
    line.advice = "no AVX2 with FMA: updates on the host will be slow; a virtual machine may hide them (cpu=host)";
  }
  return line;
}

ReportLine memory_line(const MemoryInfo& memory) {
  return {"memory",
          fmt::format("{}, {} available", size_or(memory.total_bytes, "unknown"),
                      size_or(memory.available_bytes, "unknown")),
          ""};
}

ReportLine cgroup_line(const MemoryInfo& memory) {
  const auto& cgroup = memory.cgroup;
  if (cgroup.limit_bytes == kUnlimitedBytes) {
    return {"cgroup memory", "no limit", ""};
  }
  ReportLine line{
      "cgroup memory",
      fmt::format("limit {}, {} used, {} of it reclaimable ({})", format_bytes(cgroup.limit_bytes),
                  format_bytes(cgroup.current_bytes), format_bytes(cgroup.reclaimable_bytes), cgroup.folder),
      ""};
  if (cgroup.limit_bytes < memory.total_bytes / 10 * 9) {
    line.advice = fmt::format(
        "only {} can be offloaded to the host, whatever the machine has; raise the limit "
        "(docker --memory, systemd MemoryMax, a pod's memory limit, a job's --mem)",
        format_bytes(cgroup.room_bytes()));
  }
  return line;
}

ReportLine swap_line(const MemoryInfo& memory) {
  if (memory.swap_bytes == 0) {
    return {"swap", "off", ""};
  }
  return {"swap", format_bytes(memory.swap_bytes),
          "states that are swapped out stall training; turn it off (swapoff -a) or keep enough memory free"};
}

ReportLine memlock_line(const MemoryInfo& memory) {
  ReportLine line{"locked memory", size_or(memory.memlock_limit_bytes, "no limit"), ""};
  if (memory.memlock_limit_bytes < kEnoughLockedBytes) {
    line.advice =
        "NVMe staging buffers cannot be registered and plain ones are used; raise the limit (ulimit -l "
        "unlimited, docker --ulimit memlock=-1)";
  }
  return line;
}

ReportLine huge_page_line(const HostInfo& host) {
  static constexpr const char* kNames[] = {"unknown", "never", "madvise", "always"};
  ReportLine line{"huge pages",
                  fmt::format("{}, {}", kNames[static_cast<int>(host.thp_mode)],
                              host.huge_page_bytes == 0 ? "none" : format_bytes(host.huge_page_bytes)),
                  ""};
  if (host.thp_mode == ThpMode::kNever) {
    line.advice =
        "updates on the host are slower with small pages; allow them (echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled)";
  }
  return line;
}

ReportLine numa_line(const HostInfo& host) {
  std::vector<std::string> nodes;
  for (const auto& node : host.numa_nodes) {
    nodes.push_back(fmt::format("{}: {} cores, {}, {} free", node.id, node.num_cores, format_bytes(node.total_bytes),
                                format_bytes(node.free_bytes)));
  }
  return {"NUMA nodes", nodes.empty() ? "unknown" : fmt::format("{}", fmt::join(nodes, "; ")), ""};
}

}  // namespace

std::vector<ReportLine> report(const HostInfo& host) {
  const auto& memory = host.memory;
  std::vector<ReportLine> lines{{"kernel", host.kernel_version + (host.in_container ? " (in a container)" : ""), ""},
                                {"processor", host.cpu_model.empty() ? "unknown" : host.cpu_model, ""},
                                cores_line(host),
                                instruction_line(host),
                                memory_line(memory),
                                cgroup_line(memory),
                                swap_line(memory),
                                memlock_line(memory),
                                huge_page_line(host),
                                numa_line(host)};
  if (memory.address_space_left_bytes != kUnlimitedBytes) {
    lines.push_back(
        {"address space", format_bytes(memory.address_space_left_bytes) + " left",
         "the limit also counts what is reserved and never used, as GPUs do; lift it (ulimit -v unlimited)"});
  }
  return lines;
}

}  // namespace pannier
