#include "pannier/hardware/host_info.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "pannier/hardware/kernel_text.h"

namespace pannier {
namespace {

namespace fs = std::filesystem;

// The sets that a kernel of ours, or of torch, is chosen by. Sorted.
constexpr std::array<std::string_view, 20> kInstructionSets{
    "amx_bf16", "amx_tile", "asimd", "asimdhp", "avx", "avx2", "avx512_bf16", "avx512_fp16", "avx512bw", "avx512dq",
    "avx512f",  "avx512vl", "bf16",  "f16c",    "fma", "sse2", "sse4_1",      "ssse3",       "sve",      "sve2"};

// The soft limit of a line such as "Max locked memory     8388608      8388608     bytes".
std::size_t process_limit(std::string_view limits, std::string_view name) {
  for (const auto line : split_at(limits, '\n')) {
    if (line.starts_with(name)) {
      const auto words = split_words(line.substr(name.size()));
      return words.empty() ? kUnlimitedBytes : parse_count(words.front()).value_or(kUnlimitedBytes);
    }
  }
  return kUnlimitedBytes;
}

void read_processor(const fs::path& root, HostInfo& host) {
  const auto text = read_kernel_text(root / "proc/cpuinfo").value_or("");
  host.cpu_model = line_value(text, "model name");
  auto flags = split_words(line_value(text, "flags"));  // x86.
  if (flags.empty()) {
    flags = split_words(line_value(text, "Features"));  // ARM.
  }
  for (const auto name : kInstructionSets) {
    if (std::find(flags.begin(), flags.end(), name) != flags.end()) {
      host.instruction_sets.emplace_back(name);
    }
  }
}

void read_cores(const fs::path& root, double cpu_quota, HostInfo& host) {
  host.affinity_cores = std::max(1, static_cast<int>(allowed_cores(root).size()));
  host.cpu_quota = cpu_quota;
  const auto within_quota = std::min(std::floor(cpu_quota), static_cast<double>(host.affinity_cores));
  host.usable_cores = std::max(1, static_cast<int>(within_quota));
}

void read_numa_nodes(const fs::path& root, std::string_view status, HostInfo& host) {
  const auto folder = root / "sys/devices/system/node";
  const auto online = parse_id_list(read_kernel_text(folder / "online").value_or(""));
  const auto allowed = parse_id_list(line_value(status, "Mems_allowed_list"));
  for (const int id : online) {
    if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), id) == allowed.end()) {
      continue;
    }
    const auto node = folder / ("node" + std::to_string(id));
    const auto memory = read_kernel_text(node / "meminfo").value_or("");
    const auto cores = parse_id_list(read_kernel_text(node / "cpulist").value_or(""));
    host.numa_nodes.push_back({.id = id,
                               .num_cores = static_cast<int>(cores.size()),
                               .total_bytes = find_field(memory, "MemTotal:").value_or(0),
                               .free_bytes = find_field(memory, "MemFree:").value_or(0)});
  }
}

void read_huge_pages(const fs::path& root, HostInfo& host) {
  const auto folder = root / "sys/kernel/mm/transparent_hugepage";
  const auto mode = read_kernel_text(folder / "enabled");
  if (!mode) {
    return;
  }
  if (mode->find("[never]") != std::string::npos) {
    host.thp_mode = ThpMode::kNever;
  } else if (mode->find("[madvise]") != std::string::npos) {
    host.thp_mode = ThpMode::kMadvise;
  } else if (mode->find("[always]") != std::string::npos) {
    host.thp_mode = ThpMode::kAlways;
  }
  const auto size = read_kernel_text(folder / "hpage_pmd_size");
  const auto memory = read_kernel_text(root / "proc/meminfo").value_or("");
  host.huge_page_bytes =
      size ? parse_count(*size).value_or(0) : find_field(memory, "Hugepagesize:").value_or(0);  // Before Linux 4.15.
}

bool looks_like_container(const fs::path& root) {
  std::error_code error;
  for (const char* mark : {".dockerenv", "run/.containerenv", "run/systemd/container"}) {
    if (fs::exists(root / mark, error)) {
      return true;
    }
  }
  const auto first_process = read_kernel_text(root / "proc/1/cgroup").value_or("");
  const auto environment = read_kernel_text(root / "proc/1/environ").value_or("");
  const auto names = {"docker", "kubepods", "containerd", "libpod", "lxc"};
  return std::any_of(names.begin(), names.end(),
                     [&](const char* name) { return first_process.find(name) != std::string::npos; }) ||
         environment.starts_with("container=") ||
         environment.find(std::string("\0container=", 11)) != std::string::npos;
}

}  // namespace

MemoryInfo probe_memory(const fs::path& root) {
  MemoryInfo memory;
  const auto text = read_kernel_text(root / "proc/meminfo").value_or("");
  memory.total_bytes = find_field(text, "MemTotal:").value_or(kUnlimitedBytes);
  memory.swap_bytes = find_field(text, "SwapTotal:").value_or(0);
  if (const auto available = find_field(text, "MemAvailable:")) {
    memory.available_bytes = *available;
  } else if (const auto free = find_field(text, "MemFree:")) {
    memory.available_bytes = *free;  // Some sandboxes leave MemAvailable out.
  }
  const auto limits = read_kernel_text(root / "proc/self/limits").value_or("");
  memory.memlock_limit_bytes = process_limit(limits, "Max locked memory");
  const auto address_space = process_limit(limits, "Max address space");
  if (address_space != kUnlimitedBytes) {
    const auto status = read_kernel_text(root / "proc/self/status").value_or("");
    memory.address_space_left_bytes =
        address_space - std::min(address_space, find_field(status, "VmSize:").value_or(0));
  }
  memory.cgroup = probe_cgroup_memory(root);
  return memory;
}

std::size_t host_bytes_available(const MemoryInfo& memory) noexcept {
  return std::min({memory.available_bytes, memory.address_space_left_bytes, memory.cgroup.room_bytes()});
}

HostInfo probe_host(const fs::path& root) {
  HostInfo host;
  const auto status = read_kernel_text(root / "proc/self/status").value_or("");
  host.memory = probe_memory(root);
  read_processor(root, host);
  read_cores(root, probe_cgroup(root).cpu_quota, host);
  read_numa_nodes(root, status, host);
  read_huge_pages(root, host);
  const auto release = read_kernel_text(root / "proc/sys/kernel/osrelease").value_or("");
  host.kernel_version = release.substr(0, release.find('\n'));
  host.in_container = looks_like_container(root);
  return host;
}

}  // namespace pannier
