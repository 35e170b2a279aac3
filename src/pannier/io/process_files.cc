#include "pannier/io/process_files.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr std::size_t kMaxNames = 64;
constexpr std::size_t kMaxFds = 1024;
constexpr int kFreeSlot = -1;
constexpr int kBeingFilled = -2;

struct NameSlot {
  std::atomic<pid_t> process{kFreeSlot};  ///< Whose name it is, once the path is written.
  std::array<char, PATH_MAX> path{};
};

// State of the process, as its descriptors and its signal handlers are: there is one set of either.
std::array<NameSlot, kMaxNames> names;
std::array<std::atomic<int>, kMaxFds> fds;  // The descriptor plus one; 0 is free.
std::once_flag handlers_once;

void close_in_child() noexcept {
  for (auto& slot : fds) {
    if (const int fd = slot.exchange(0) - 1; fd >= 0) {
      ::close(fd);
    }
  }
}

void install_handlers() {
  std::call_once(handlers_once, [] {
    ::pthread_atfork(nullptr, nullptr, &close_in_child);
    std::atexit(&remove_named_files);
  });
}

void on_signal(int signal) {
  remove_named_files();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

OwnedFd::OwnedFd(int fd) noexcept : fd_(fd), slot_(kMaxFds), process_(::getpid()) {
  if (fd < 0) {
    return;
  }
  install_handlers();
  // With the table full, children keep the descriptor: memory and disk are given back when they end.
  for (std::size_t i = 0; i < kMaxFds; ++i) {
    int expected = 0;
    if (fds[i].compare_exchange_strong(expected, fd + 1)) {
      slot_ = i;
      return;
    }
  }
}

OwnedFd::OwnedFd(OwnedFd&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), slot_(other.slot_), process_(other.process_) {}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    slot_ = other.slot_;
    process_ = other.process_;
  }
  return *this;
}

void OwnedFd::reset() noexcept {
  // In a forked child the number may name something else by now.
  if (fd_ >= 0 && process_ == ::getpid()) {
    if (slot_ < kMaxFds) {
      fds[slot_].store(0);
    }
    ::close(fd_);
  }
  fd_ = -1;
}

OwnedName::OwnedName(const std::string& path) {
  if (path.empty() || path.front() != '/' || path.size() >= PATH_MAX) {
    throw ConfigError(fmt::format("path '{}' must be absolute and shorter than {} bytes", path, PATH_MAX));
  }
  install_handlers();
  for (std::size_t i = 0; i < kMaxNames; ++i) {
    pid_t expected = kFreeSlot;
    if (names[i].process.compare_exchange_strong(expected, kBeingFilled)) {
      std::memcpy(names[i].path.data(), path.c_str(), path.size() + 1);
      slot_ = i;
      process_ = ::getpid();
      names[i].process.store(process_);
      return;
    }
  }
  throw ConfigError(fmt::format("no more than {} NVMe folders can be used at once", kMaxNames));
}

OwnedName::OwnedName(OwnedName&& other) noexcept : slot_(other.slot_), process_(std::exchange(other.process_, 0)) {}

OwnedName& OwnedName::operator=(OwnedName&& other) noexcept {
  if (this != &other) {
    remove();
    slot_ = other.slot_;
    process_ = std::exchange(other.process_, 0);
  }
  return *this;
}

void OwnedName::remove() noexcept {
  if (process_ != 0 && process_ == ::getpid()) {
    ::unlink(names[slot_].path.data());
  }
  release();
}

void OwnedName::release() noexcept {
  if (process_ != 0 && process_ == ::getpid()) {
    names[slot_].process.store(kFreeSlot);
  }
  process_ = 0;
}

void remove_named_files() noexcept {
  const pid_t process = ::getpid();
  for (auto& slot : names) {
    if (slot.process.load() == process) {
      ::unlink(slot.path.data());
    }
  }
}

void remove_named_files_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction current{};
    const bool is_default = ::sigaction(signal, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) == 0 &&
                            current.sa_handler == SIG_DFL;
    if (is_default) {
      struct sigaction ours{};
      ours.sa_handler = &on_signal;
      ::sigemptyset(&ours.sa_mask);
      // On its way out of the handler the signal, raised again, must not wait until the handler has returned.
      ours.sa_flags = SA_NODEFER;
      ::sigaction(signal, &ours, nullptr);
    }
  }
}

}  // namespace pannier
