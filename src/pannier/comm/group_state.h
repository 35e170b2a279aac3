// What the threads of one rank share about its group: whether it has failed, and a place to wait. Everybody who waits
// for other ranks waits here, so that one failure wakes all of them, whatever the library below is doing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace pannier {

/// Thread-safe. Kept by shared_ptr, since threads that are stuck in a library's call may outlive the communicator.
class GroupState {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Outcome { kReady, kFailed, kDeadline };

  /// Marks the group dead for good and wakes everybody. The first failure stays, and the handler runs once, here.
  void fail(const std::string& message);
  [[nodiscard]] std::optional<std::string> failure() const;
  /// Throws CollectiveError with `operation`, the failure and what explains it, if there is one.
  void throw_if_failed(const std::string& operation) const;
  /// Sets what is added to the text of a failure that is thrown.
  void explain_failures(std::function<std::string(const std::string&)> explain);
  /// Sets what is called when the group fails; it is called at once if that has happened.
  void on_failure(std::function<void()> handler);
  /// Takes the handler away; afterwards it is not called any more, nor running.
  void drop_handler();

  /// Runs `change` under the lock and wakes everybody.
  template <class Change>
  void change(Change&& body) {
    {
      const std::lock_guard lock(mutex_);
      std::forward<Change>(body)();
    }
    changed_.notify_all();
  }

  /// Waits until `ready`, which is called under the lock, the failure or the deadline. Ready wins over failed.
  [[nodiscard]] Outcome wait(Clock::time_point deadline, const std::function<bool()>& ready);
  /// As `wait`, but a failure does not end it.
  bool wait_despite_failure(Clock::time_point deadline, const std::function<bool()>& ready);

 private:
  void wait_a_while(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);

  mutable std::mutex mutex_;  ///< Guards the failure, and what callers keep under `change` and `wait`.
  std::condition_variable changed_;
  std::optional<std::string> failure_;
  std::function<std::string(const std::string&)> explain_;  ///< May be empty.
  std::recursive_mutex handler_mutex_;  ///< Guards the handler while it runs; it may fail the group again.
  std::function<void()> handler_;
};

}  // namespace pannier
