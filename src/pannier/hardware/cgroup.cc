#include "pannier/hardware/cgroup.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "pannier/hardware/kernel_text.h"

namespace pannier {
namespace {

namespace fs = std::filesystem;

// A hierarchy as this process sees it, both folders below the root that is looked at.
struct Hierarchy {
  fs::path mount;
  fs::path own_group;  // mount, or a folder in it.
};

// Names of the files of one version of the memory controller.
struct MemoryFiles {
  const char* limit;
  const char* soft_limit;  // Where the kernel starts to throttle instead of killing; null where there is none.
  const char* current;
  const char* inactive_cache;  // In memory.stat, descendants included.
};
constexpr MemoryFiles kMemoryV1{"memory.limit_in_bytes", nullptr, "memory.usage_in_bytes", "total_inactive_file"};
constexpr MemoryFiles kMemoryV2{"memory.max", "memory.high", "memory.current", "inactive_file"};

// Version 1 says "no limit" by the largest page counter, 2^63 rounded down to the page.
constexpr std::size_t kLargestRealLimit = std::size_t{1} << 60;

bool has_part(std::string_view list, std::string_view wanted) {
  const auto parts = split_at(list, ',');
  return std::find(parts.begin(), parts.end(), wanted) != parts.end();
}

// mountinfo writes a space in a path as \040.
std::string unescape(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_octal = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && is_octal(i + 1) && is_octal(i + 2) && is_octal(i + 3)) {
      plain.push_back(static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0')));
      i += 3;
    } else {
      plain.push_back(text[i]);
    }
  }
  return plain;
}

// The group's path in the hierarchy of `controller` (empty: version 2), from lines "4:memory,cpu:/some/group".
std::optional<std::string> group_path(std::string_view cgroup_text, std::string_view controller) {
  for (const auto line : split_at(cgroup_text, '\n')) {
    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) {
      continue;
    }
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : has_part(controllers, controller)) {
      return std::string(line.substr(second + 1));
    }
  }
  return std::nullopt;
}

// True when `path` is `folder` or lies in it.
bool lies_in(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

// Finds where `controller` (empty: version 2) is mounted and our group in it. A container may see only a part of the
// hierarchy, mounted from its own group, while the group's path is told from the host's root: the mount's root is then
// cut off; a group outside of what is mounted is taken as the mount itself.
std::optional<Hierarchy> find_hierarchy(const fs::path& root, std::string_view controller) {
  const auto cgroup_text = read_kernel_text(root / "proc/self/cgroup");
  const auto group = cgroup_text ? group_path(*cgroup_text, controller) : std::nullopt;
  if (!group) {
    return std::nullopt;
  }
  std::optional<Hierarchy> found;
  const auto mounts = read_kernel_text(root / "proc/self/mountinfo").value_or("");
  for (const auto line : split_at(mounts, '\n')) {
    const auto words = split_words(line);
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || std::distance(dash, words.end()) < 4) {
      continue;
    }
    const bool matches =
        controller.empty() ? dash[1] == "cgroup2" : dash[1] == "cgroup" && has_part(dash[3], controller);
    if (!matches) {
      continue;
    }
    const fs::path mount_root = unescape(words[3]);
    const auto mount = root / fs::path(unescape(words[4])).relative_path();
    const auto own = fs::path(*group).lexically_normal();
    const auto inside = own.lexically_relative(mount_root);
    if (lies_in(own, mount_root) && own.string().find("..") == std::string::npos) {
      return Hierarchy{mount, inside == "." ? mount : mount / inside};
    }
    found = found ? found : Hierarchy{mount, mount};
  }
  if (!found && mounts.empty()) {  // No mountinfo: the usual places.
    const auto mount = root / "sys/fs/cgroup" / controller;
    return Hierarchy{mount, mount / fs::path(*group).relative_path()};
  }
  return found;
}

// Our own group and its ancestors, up to the mount.
std::vector<fs::path> levels(const Hierarchy& hierarchy) {
  std::vector<fs::path> folders;
  for (auto folder = hierarchy.own_group; lies_in(folder, hierarchy.mount); folder = folder.parent_path()) {
    folders.push_back(folder);
    if (folder == hierarchy.mount || folder == folder.parent_path()) {
      break;
    }
  }
  return folders;
}

std::size_t read_limit(const fs::path& file) {
  const auto text = read_kernel_text(file);
  const auto value = text ? parse_count(*text) : std::nullopt;
  return value && *value <= kLargestRealLimit ? *value : kUnlimitedBytes;
}

CgroupMemory read_memory(const fs::path& folder, const MemoryFiles& files) {
  CgroupMemory memory;
  memory.limit_bytes = read_limit(folder / files.limit);
  if (files.soft_limit != nullptr) {
    memory.limit_bytes = std::min(memory.limit_bytes, read_limit(folder / files.soft_limit));
  }
  if (memory.limit_bytes == kUnlimitedBytes) {
    return memory;
  }
  memory.folder = folder.string();
  if (const auto text = read_kernel_text(folder / files.current)) {
    memory.current_bytes = parse_count(*text).value_or(0);
  }
  if (const auto text = read_kernel_text(folder / "memory.stat")) {
    memory.reclaimable_bytes = std::min(find_field(*text, files.inactive_cache).value_or(0), memory.current_bytes);
  }
  return memory;
}

double quota_of(std::string_view quota, std::string_view period) {
  const auto microseconds = parse_count(quota);
  const auto per = parse_count(period);
  if (!microseconds || !per || *microseconds == 0 || *per == 0) {
    return std::numeric_limits<double>::infinity();  // "max", -1 and nonsense limit nothing.
  }
  return static_cast<double>(*microseconds) / static_cast<double>(*per);
}

double probe_cpu_quota(const fs::path& root) {
  double quota = std::numeric_limits<double>::infinity();
  if (const auto v2 = find_hierarchy(root, "")) {
    for (const auto& folder : levels(*v2)) {
      const auto text = read_kernel_text(folder / "cpu.max").value_or("");
      const auto words = split_words(text);
      quota = words.size() == 2 ? std::min(quota, quota_of(words[0], words[1])) : quota;
    }
  }
  if (const auto v1 = find_hierarchy(root, "cpu")) {
    for (const auto& folder : levels(*v1)) {
      quota = std::min(quota, quota_of(read_kernel_text(folder / "cpu.cfs_quota_us").value_or(""),
                                       read_kernel_text(folder / "cpu.cfs_period_us").value_or("")));
    }
  }
  return quota;
}

}  // namespace

std::size_t CgroupMemory::room_bytes() const noexcept {
  if (limit_bytes == kUnlimitedBytes) {
    return kUnlimitedBytes;
  }
  const auto used = current_bytes - std::min(reclaimable_bytes, current_bytes);
  return limit_bytes - std::min(used, limit_bytes);
}

CgroupMemory probe_cgroup_memory(const fs::path& root) {
  CgroupMemory tightest;
  for (const auto& [controller, files] : {std::pair{"", kMemoryV2}, std::pair{"memory", kMemoryV1}}) {
    const auto hierarchy = find_hierarchy(root, controller);
    for (const auto& folder : hierarchy ? levels(*hierarchy) : std::vector<fs::path>{}) {
      auto memory = read_memory(folder, files);
      if (memory.room_bytes() < tightest.room_bytes()) {
        tightest = std::move(memory);
      }
    }
  }
  return tightest;
}

CgroupLimits probe_cgroup(const fs::path& root) { return {probe_cgroup_memory(root), probe_cpu_quota(root)}; }

}  // namespace pannier
