#include "pannier/io/folder_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/hardware/kernel_text.h"
#include "pannier/io/folder.h"
#include "pannier/io/process_files.h"

namespace pannier {
namespace {

constexpr std::string_view kPrefix = ".pannier-";
constexpr std::string_view kLockSuffix = ".lock";
constexpr std::string_view kScratchSuffix = ".scratch";
constexpr std::size_t kStartField = 19;  // Of /proc/PID/stat, counted after the name in parentheses.
constexpr auto kRetryPause = std::chrono::milliseconds(10);

std::string boot_id() {
  const auto text = read_kernel_text("/proc/sys/kernel/random/boot_id").value_or("");
  return text.size() >= 8 ? text.substr(0, 8) : "unknown";
}

// When a process began, in ticks after boot; nothing when it does not run. Tells a process from a later one of its
// number.
std::optional<std::size_t> start_ticks(pid_t process) {
  const auto text = read_kernel_text(fmt::format("/proc/{}/stat", process));
  const auto name_end = text ? text->rfind(')') : std::string::npos;
  if (name_end == std::string::npos) {
    return std::nullopt;
  }
  const auto words = split_words(std::string_view(*text).substr(name_end + 1));
  return words.size() > kStartField ? parse_count(words[kStartField]) : std::nullopt;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

std::string describe_this_process() {
  return fmt::format("process {} of host {}, which took it at {:%Y-%m-%dT%H:%M:%SZ}", ::getpid(), host_name(),
                     fmt::gmtime(std::time(nullptr)));
}

std::string read_holder(int fd) {
  std::array<char, 512> text{};
  const auto nbytes = ::pread(fd, text.data(), text.size(), 0);
  return nbytes > 0 ? std::string(text.data(), static_cast<std::size_t>(nbytes)) : "a process that left no name";
}

bool is_the_file_at(int fd, const std::string& path) {
  struct stat opened{};
  struct stat named{};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

// Removes a lock file of another boot unless someone holds it.
bool remove_if_unlocked(const std::string& path) {
  const OwnedFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  return fd.is_open() && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && ::unlink(path.c_str()) == 0;
}

// A scratch file loses its name at once, so removing a name never hurts: not even in the moment in which another
// container, whose processes are not to be seen from here, has given it.
int remove_leftovers(const std::string& folder, const std::string& own_lock) {
  int removed = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    const std::string path = it->path();
    if (!name.starts_with(kPrefix) || path == own_lock) {
      continue;
    }
    const bool is_removed = name.ends_with(kLockSuffix) ? remove_if_unlocked(path)
                                                        : is_dead_scratch_name(name) && ::unlink(path.c_str()) == 0;
    removed += is_removed ? 1 : 0;
  }
  return removed;
}

}  // namespace

struct FolderLock::Held {
  std::string path;
  OwnedFd fd;
  OwnedName name;  ///< After the descriptor, so that the name goes while the lock is held.
  int leftovers_removed = 0;
  pid_t process = ::getpid();
};

/// The folders that this process holds, by file system and number. State of the process, as the kernel's locks are.
struct FolderLock::Registry {
  std::mutex held_mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Held>> held;

  static Registry& of_this_process() {
    static auto* const registry = new Registry;  // Never destroyed: locks may be let go while the process exits.
    return *registry;
  }
};

void FolderLockOptions::validate() const {
  if (!(wait_seconds >= 0) || !std::isfinite(wait_seconds)) {
    throw ConfigError(fmt::format("wait_seconds must be finite and not negative, got {}", wait_seconds));
  }
}

FolderLock::FolderLock(const std::string& folder, const FolderLockOptions& options) {
  options.validate();
  const FolderInfo info = look_at_folder(folder);
  struct stat facts{};
  if (::stat(info.path.c_str(), &facts) != 0) {
    throw IoError(fmt::format("NVMe folder '{}'", folder), errno);
  }
  auto& registry = Registry::of_this_process();
  const std::lock_guard lock(registry.held_mutex);
  auto& entry = registry.held[{facts.st_dev, facts.st_ino}];
  held_ = entry.lock();
  if (held_ != nullptr && held_->process == ::getpid()) {
    return;
  }
  const std::string path = fmt::format("{}/{}{}{}", info.path, kPrefix, boot_id(), kLockSuffix);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.wait_seconds);
  while (true) {
    OwnedFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!fd.is_open()) {
      throw IoError(fmt::format("create lock file '{}'", path), errno);
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) {
      if (!is_the_file_at(fd.get(), path)) {
        continue;  // Its last holder removed it between open and lock.
      }
      held_ = std::make_shared<Held>(Held{path, std::move(fd), OwnedName(path)});
      break;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      throw IoError(fmt::format("lock '{}'", path), errno);
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      throw IoError(fmt::format("NVMe folder '{}' is in use by {}", folder, read_holder(fd.get())), EBUSY);
    }
    std::this_thread::sleep_for(kRetryPause);
  }
  // Where the disk is too full for the message, the lock holds without it.
  const std::string text = describe_this_process();
  if (::ftruncate(held_->fd.get(), 0) == 0 && ::pwrite(held_->fd.get(), text.data(), text.size(), 0) < 0) {
    errno = 0;
  }
  held_->leftovers_removed = remove_leftovers(info.path, path);
  entry = held_;
}

const std::string& FolderLock::lock_path() const {
  PANNIER_CHECK(held_ != nullptr, "a lock was asked for its path after it was let go");
  return held_->path;
}

int FolderLock::leftovers_removed() const { return held_ != nullptr ? held_->leftovers_removed : 0; }

std::string scratch_path(const std::string& folder, int rank) {
  static std::atomic<int> count{0};
  return fmt::format("{}/{}{}-{}-{}-rank{}-{}{}", folder, kPrefix, boot_id(), ::getpid(),
                     start_ticks(::getpid()).value_or(0), rank, ++count, kScratchSuffix);
}

bool is_dead_scratch_name(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kScratchSuffix)) {
    return false;
  }
  const auto words = split_at(std::string_view(name).substr(kPrefix.size()), '-');
  if (words.size() < 3) {
    return false;
  }
  const auto process = parse_count(words[1]);
  const auto started = parse_count(words[2]);
  if (!process || !started) {
    return false;
  }
  return words[0] != boot_id() || start_ticks(static_cast<pid_t>(*process)) != started;
}

}  // namespace pannier
