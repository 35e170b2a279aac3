// What kind of place a folder is. Opening a file proves nothing: memory file systems accept direct I/O, copy-on-write
// ones accept a preallocation that they do not keep. So the type of the file system is looked at first.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pannier {

/// A folder that state may rest in, and the file system that it is on.
struct FolderInfo {
  std::string path;              ///< Absolute, without links.
  std::string file_system;       ///< "ext4", "xfs", "tmpfs", "nfs", or the number in hexadecimal when it is not known.
  bool is_in_memory = false;     ///< tmpfs or ramfs: what is written there takes host memory.
  bool is_network = false;       ///< Another machine holds the bytes.
  bool copies_on_write = false;  ///< Writes go elsewhere than to what was preallocated.
  std::size_t free_bytes = 0;    ///< What this user may still take.
  std::size_t total_bytes = 0;
};

/// Looks at `path`. Throws IoError naming the path and what is wrong when it is missing, is not a folder, or cannot be
/// written to.
[[nodiscard]] FolderInfo look_at_folder(const std::string& path);

/// What a user should know before state rests there, one sentence each, each naming the path: memory, network, copies
/// on write, less than a tenth free. Empty for a plain local disk.
[[nodiscard]] std::vector<std::string> folder_warnings(const FolderInfo& folder);

}  // namespace pannier
