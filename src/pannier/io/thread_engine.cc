#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "pannier/io/engines.h"

namespace pannier {
namespace {

// More threads than this switch more than they add; the rest of the depth waits in the queue.
constexpr int kMaxThreads = 64;

int move_once(const DiskFile& file, const IoAttempt& attempt) {
  const int fd = file.fd(attempt.file);
  const auto at = static_cast<off_t>(attempt.offset);
  const auto moved =
      attempt.is_write ? ::pwrite(fd, attempt.data, attempt.nbytes, at) : ::pread(fd, attempt.data, attempt.nbytes, at);
  return moved < 0 ? -errno : static_cast<int>(moved);
}

/// Each thread carries one piece at a time, so the depth is the number of threads.
class ThreadEngine final : public IoEngine {
 public:
  ThreadEngine(const DiskFile& file, const IoEngineOptions& options)
      : IoEngine(file, options), hook_(options.hook), process_(::getpid()) {
    try {
      for (int i = 0; i < std::min(options.depth, kMaxThreads); ++i) {
        threads_.emplace_back([this] { work(); });
      }
    } catch (...) {
      close();
      throw;
    }
  }
  ~ThreadEngine() override { close(); }

  void close() noexcept override {
    if (process_ != ::getpid()) {
      // The threads are the parent's, and the mutex may be one's of them.
      for (auto& thread : threads_) {
        thread.detach();
      }
      threads_.clear();
      return;
    }
    queue_.close();
    for (auto& thread : threads_) {
      thread.join();
    }
    threads_.clear();
  }
  [[nodiscard]] const char* name() const noexcept override { return "threads"; }

 private:
  void work() {
    detail::block_signals();
    while (auto piece = queue_.wait_pop()) {
      IoAttempt attempt{piece->is_write, piece->place.file, piece->place.offset, piece->data, piece->place.nbytes};
      std::optional<int> result = hook_ != nullptr ? hook_->before(attempt) : std::nullopt;
      if (!result) {
        result = move_once(queue_.file(), attempt);
      }
      if (hook_ != nullptr) {
        result = hook_->after(attempt, *result);
      }
      queue_.finish(std::move(*piece), *result);
    }
  }

  PieceHook* hook_;
  pid_t process_;
  std::vector<std::thread> threads_;
};

}  // namespace

namespace detail {

std::unique_ptr<IoEngine> make_thread_engine(const DiskFile& file, const IoEngineOptions& options) {
  return std::make_unique<ThreadEngine>(file, options);
}

}  // namespace detail

}  // namespace pannier
