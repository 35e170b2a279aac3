#include "pannier/io/disk_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/io/folder.h"
#include "pannier/io/folder_lock.h"

namespace pannier {
namespace {

constexpr int kMaxInterrupts = 100;

std::size_t round_to(std::size_t nbytes, std::size_t step) { return (nbytes + step - 1) / step * step; }

IoError no_room(const std::string& folder, std::size_t wanted, std::size_t free, int error) {
  return {fmt::format("no room in NVMe folder '{}': {} wanted ({} bytes), {} free ({} bytes)", folder,
                      format_bytes(wanted), wanted, format_bytes(free), free),
          error};
}

// Folders of one file system share what is free there, so their shares are added up before anything is created.
void check_room(const std::vector<std::string>& folders, const std::vector<std::size_t>& shares) {
  std::map<dev_t, std::size_t> wanted;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    const FolderInfo info = look_at_folder(folders[i]);
    struct stat facts{};
    if (::stat(info.path.c_str(), &facts) != 0) {
      throw IoError(fmt::format("NVMe folder '{}'", folders[i]), errno);
    }
    auto& sum = wanted[facts.st_dev];
    sum += shares[i];
    if (sum > info.free_bytes) {
      throw no_room(folders[i], sum, info.free_bytes, ENOSPC);
    }
    // Beyond this limit the kernel would not refuse, but end the process by SIGXFSZ.
    struct rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && shares[i] > limit.rlim_cur) {
      throw IoError(fmt::format("NVMe folder '{}': a file of {} bytes wanted, the limit on file size (ulimit -f) is {}",
                                folders[i], shares[i], limit.rlim_cur),
                    EFBIG);
    }
  }
}

OwnedFd open_unnamed(const std::string& folder) {
  return OwnedFd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600));
}

// For file systems without O_TMPFILE. A process killed between creation and removal leaves an empty file, which the
// next run recognises by its name.
OwnedFd open_and_remove_name(const std::string& folder, int rank) {
  const std::string path = scratch_path(folder, rank);
  OwnedName name(path);
  OwnedFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.is_open()) {
    const int error = errno;
    name.release();
    throw IoError(fmt::format("create '{}'", path), error);
  }
  return fd;
}

void forbid_copy_on_write(int fd) {
  int flags = 0;
  if (::ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0) {
    flags |= FS_NOCOW_FL;
    // Where it is refused, the folder's warning about copies on write stands.
    ::ioctl(fd, FS_IOC_SETFLAGS, &flags);
  }
}

int allocate(int fd, std::size_t nbytes) {
  for (int i = 0; i < kMaxInterrupts; ++i) {
    if (::fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) == 0) {
      return 0;
    }
    if (errno != EINTR) {
      return errno;
    }
  }
  return EINTR;
}

// Why the file system wants more for direct I/O than we promise; nothing when it does not or does not say.
std::optional<std::string> reason_against_direct(int fd) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 && (facts.stx_mask & STATX_DIOALIGN) != 0) {
    if (facts.stx_dio_offset_align == 0) {
      return "its file system offers no direct I/O";
    }
    if (facts.stx_dio_offset_align > kIoAlignment || facts.stx_dio_mem_align > kIoAlignment) {
      return fmt::format("its file system wants direct I/O in multiples of {} bytes, memory in {}",
                         facts.stx_dio_offset_align, facts.stx_dio_mem_align);
    }
  }
#else
  static_cast<void>(fd);
#endif
  return std::nullopt;
}

struct alignas(kIoAlignment) Block {
  std::array<unsigned char, kIoAlignment> bytes;
};

// Writes a block, reads it back and compares. 0, or the errno value that says what is wrong.
int try_block(int fd, std::uint64_t offset) {
  Block written{};
  Block read{};
  for (std::size_t i = 0; i < kIoAlignment; ++i) {
    written.bytes[i] = static_cast<unsigned char>(i * 31 + i / 256 + 7);
  }
  const auto at = static_cast<off_t>(offset);
  const auto out = ::pwrite(fd, written.bytes.data(), kIoAlignment, at);
  if (out != static_cast<ssize_t>(kIoAlignment)) {
    return out < 0 ? errno : ENOSPC;
  }
  const auto in = ::pread(fd, read.bytes.data(), kIoAlignment, at);
  if (in != static_cast<ssize_t>(kIoAlignment)) {
    return in < 0 ? errno : EIO;
  }
  return written.bytes == read.bytes ? 0 : EIO;
}

bool set_direct(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

void DiskFileOptions::validate() const {
  if (folders.empty()) {
    throw ConfigError("nvme_path is needed: a folder, or several");
  }
  if (stripe_nbytes == 0 || stripe_nbytes % kIoAlignment != 0) {
    throw ConfigError(
        fmt::format("stripe_nbytes must be a positive multiple of {}, got {}", kIoAlignment, stripe_nbytes));
  }
  if (nbytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) / 2) {
    throw ConfigError(fmt::format("no disk holds {} bytes", nbytes));
  }
}

DiskFile::DiskFile(const DiskFileOptions& options)
    : nbytes_(round_to(options.nbytes, kIoAlignment)), stripe_nbytes_(options.stripe_nbytes) {
  options.validate();
  const std::size_t num_folders = options.folders.size();
  // One file holds it as it is; several hold whole stripes, and each its share of them.
  const std::size_t stripes_each =
      round_to(round_to(nbytes_, stripe_nbytes_) / stripe_nbytes_, num_folders) / num_folders;
  const std::size_t share = num_folders == 1 ? nbytes_ : stripes_each * stripe_nbytes_;
  check_room(options.folders, std::vector<std::size_t>(num_folders, share + kIoAlignment));
  for (std::size_t i = 0; i < num_folders; ++i) {
    open_one(options, i, share);
  }
}

void DiskFile::open_one(const DiskFileOptions& options, std::size_t index, std::size_t share_nbytes) {
  const FolderInfo info = look_at_folder(options.folders[index]);
  for (auto& warning : folder_warnings(info)) {
    notes_.push_back(std::move(warning));
  }
  File file;
  file.name = fmt::format("{}/(scratch file {} of rank {})", info.path, index, options.rank);
  file.nbytes = share_nbytes;
  if (options.allow_unnamed) {
    file.fd = open_unnamed(info.path);
  }
  if (!file.fd.is_open()) {
    file.fd = open_and_remove_name(info.path, options.rank);
  }
  if (info.copies_on_write) {
    forbid_copy_on_write(file.fd.get());
  }
  const std::size_t wanted = share_nbytes + kIoAlignment;
  int error = allocate(file.fd.get(), wanted);
  if (error == EOPNOTSUPP || error == ENOSYS) {
    notes_.push_back(fmt::format("NVMe folder '{}' cannot set space aside: it may run full in training", info.path));
    error = ::ftruncate(file.fd.get(), static_cast<off_t>(wanted)) == 0 ? 0 : errno;
  }
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    throw no_room(info.path, wanted, look_at_folder(info.path).free_bytes, error);
  }
  if (error != 0) {
    throw IoError(fmt::format("set {} bytes aside in NVMe folder '{}'", wanted, info.path), error);
  }
  if (options.allow_direct) {
    choose_direct(file, info.path, info.is_in_memory);
  }
  if (!file.is_direct) {
    if (const int failed = try_block(file.fd.get(), share_nbytes); failed != 0) {
      throw IoError(fmt::format("write and read back a block in NVMe folder '{}'", info.path), failed);
    }
  }
  files_.push_back(std::move(file));
}

void DiskFile::choose_direct(File& file, const std::string& folder, bool is_in_memory) {
  std::optional<std::string> reason;
  if (is_in_memory) {
    reason = "it is in memory";
  } else {
    reason = reason_against_direct(file.fd.get());
  }
  if (!reason && !set_direct(file.fd.get(), true)) {
    reason = "its file system refuses direct I/O";
  }
  if (!reason) {
    if (const int error = try_block(file.fd.get(), file.nbytes); error != 0) {
      reason = fmt::format("a trial of direct I/O failed ({})", std::strerror(error));
      set_direct(file.fd.get(), false);
    }
  }
  file.is_direct = !reason.has_value();
  if (reason) {
    notes_.push_back(fmt::format("NVMe folder '{}' is used through the page cache: {}", folder, *reason));
  }
}

FilePlace DiskFile::place(std::uint64_t offset, std::size_t nbytes) const {
  PANNIER_CHECK(offset <= nbytes_ && nbytes <= nbytes_ - offset,
                fmt::format("{} bytes at offset {} reach beyond a file of {}", nbytes, offset, nbytes_));
  PANNIER_CHECK(!files_.empty(), "a disk file was used after it was closed");
  if (files_.size() == 1) {
    return {0, offset, nbytes};
  }
  const std::uint64_t stripe = offset / stripe_nbytes_;
  const std::uint64_t within = offset % stripe_nbytes_;
  const std::uint64_t row = stripe / files_.size();
  return {static_cast<std::size_t>(stripe % files_.size()), row * stripe_nbytes_ + within,
          std::min(nbytes, stripe_nbytes_ - static_cast<std::size_t>(within))};
}

bool DiskFile::is_direct() const noexcept {
  return std::all_of(files_.begin(), files_.end(), [](const File& file) { return file.is_direct; });
}

}  // namespace pannier
