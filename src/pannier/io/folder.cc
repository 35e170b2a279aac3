#include "pannier/io/folder.h"

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

enum class Nature : std::uint8_t { kDisk, kMemory, kNetwork, kCopyOnWrite };

struct KnownType {
  std::uint32_t magic;
  const char* name;
  Nature nature;
};

// The numbers that linux/magic.h does not name are from the file systems' own sources.
constexpr std::array kKnownTypes = {
    KnownType{EXT4_SUPER_MAGIC, "ext4", Nature::kDisk},
    KnownType{0x58465342U, "xfs", Nature::kDisk},
    KnownType{F2FS_SUPER_MAGIC, "f2fs", Nature::kDisk},
    KnownType{OVERLAYFS_SUPER_MAGIC, "overlay", Nature::kDisk},
    KnownType{TMPFS_MAGIC, "tmpfs", Nature::kMemory},
    KnownType{RAMFS_MAGIC, "ramfs", Nature::kMemory},
    KnownType{BTRFS_SUPER_MAGIC, "btrfs", Nature::kCopyOnWrite},
    KnownType{0x2fc12fc1U, "zfs", Nature::kCopyOnWrite},
    KnownType{0xca451a4eU, "bcachefs", Nature::kCopyOnWrite},
    KnownType{NFS_SUPER_MAGIC, "nfs", Nature::kNetwork},
    KnownType{SMB_SUPER_MAGIC, "smb", Nature::kNetwork},
    KnownType{0xff534d42U, "cifs", Nature::kNetwork},
    KnownType{0xfe534d42U, "smb2", Nature::kNetwork},
    KnownType{CEPH_SUPER_MAGIC, "ceph", Nature::kNetwork},
    KnownType{AFS_SUPER_MAGIC, "afs", Nature::kNetwork},
    KnownType{V9FS_MAGIC, "9p", Nature::kNetwork},
    KnownType{0x0bd00bd0U, "lustre", Nature::kNetwork},
    KnownType{0x47504653U, "gpfs", Nature::kNetwork},
    KnownType{FUSE_SUPER_MAGIC, "fuse", Nature::kNetwork},
};

// Throws unless the system call before it succeeded.
void require(bool is_so, const std::string& path, const char* what) {
  const int error = errno;
  if (!is_so) {
    throw IoError(fmt::format("NVMe folder '{}'{}", path, what), error);
  }
}

}  // namespace

FolderInfo look_at_folder(const std::string& path) {
  struct stat facts{};
  require(::stat(path.c_str(), &facts) == 0, path, "");
  if (!S_ISDIR(facts.st_mode)) {
    throw IoError(fmt::format("NVMe folder '{}'", path), ENOTDIR);
  }
  require(::access(path.c_str(), R_OK | W_OK | X_OK) == 0, path, " cannot be read and written");
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  require(real != nullptr, path, "");
  struct statfs system{};
  require(::statfs(real.get(), &system) == 0, path, ": ask its file system");

  FolderInfo info;
  info.path = real.get();
  const auto magic = static_cast<std::uint32_t>(system.f_type);
  const auto* const known =
      std::find_if(kKnownTypes.begin(), kKnownTypes.end(), [&](const KnownType& type) { return type.magic == magic; });
  info.file_system = known != kKnownTypes.end() ? known->name : fmt::format("{:#x}", magic);
  const Nature nature = known != kKnownTypes.end() ? known->nature : Nature::kDisk;
  info.is_in_memory = nature == Nature::kMemory;
  info.is_network = nature == Nature::kNetwork;
  info.copies_on_write = nature == Nature::kCopyOnWrite;
  const auto block = static_cast<std::size_t>(system.f_bsize);
  info.free_bytes = static_cast<std::size_t>(system.f_bavail) * block;
  info.total_bytes = static_cast<std::size_t>(system.f_blocks) * block;
  return info;
}

std::vector<std::string> folder_warnings(const FolderInfo& folder) {
  std::vector<std::string> warnings;
  if (folder.is_in_memory) {
    warnings.push_back(
        fmt::format("NVMe folder '{}' is on {}: what is written there takes host memory, beside what the plan counts",
                    folder.path, folder.file_system));
  }
  if (folder.is_network) {
    warnings.push_back(
        fmt::format("NVMe folder '{}' is on {}: not a local disk, so its rate may vary and others share it",
                    folder.path, folder.file_system));
  }
  if (folder.copies_on_write) {
    warnings.push_back(
        fmt::format("NVMe folder '{}' is on {}, which copies on write: it may run full although space was set aside",
                    folder.path, folder.file_system));
  }
  if (folder.total_bytes > 0 && folder.free_bytes < folder.total_bytes / 10) {
    warnings.push_back(fmt::format("NVMe folder '{}' has {} of {} free: a disk this full writes slower", folder.path,
                                   format_bytes(folder.free_bytes), format_bytes(folder.total_bytes)));
  }
  return warnings;
}

}  // namespace pannier
