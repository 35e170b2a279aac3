// A fixed team of threads for work that runs where torch is not: zero-filling slabs, probing memory, testing kernels.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "pannier/base/parallel.h"

namespace pannier {

/// Runs loops on `num_threads` threads, the caller's included. One caller at a time; not re-entrant.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  /// Runs `body` over contiguous ranges of [0, count), one a thread at most, and waits. Rethrows the first exception.
  void run(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body);

  /// This team as a ParallelFor; the team must outlive it.
  [[nodiscard]] ParallelFor parallel_for();
  [[nodiscard]] int num_threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

 private:
  void work(const std::stop_token& stop, int index);
  void run_part(int part) noexcept;

  std::mutex task_mutex_;  ///< Guards everything below.
  std::condition_variable_any task_changed_;
  std::uint64_t generation_ = 0;
  int parts_left_ = 0;
  int num_parts_ = 0;
  std::int64_t count_ = 0;
  const std::function<void(std::int64_t, std::int64_t)>* body_ = nullptr;
  std::exception_ptr first_error_;
  std::vector<std::jthread> workers_;
};

}  // namespace pannier
