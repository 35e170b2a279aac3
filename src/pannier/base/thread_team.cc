#include "pannier/base/thread_team.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"

namespace pannier {

ThreadTeam::ThreadTeam(int num_threads) {
  PANNIER_CHECK(num_threads >= 1, fmt::format("a team needs at least one thread, got {}", num_threads));
  for (int i = 1; i < num_threads; ++i) {
    workers_.emplace_back([this, i](const std::stop_token& stop) { work(stop, i); });
  }
}

ThreadTeam::~ThreadTeam() {
  for (auto& worker : workers_) {
    worker.request_stop();
  }
}

void ThreadTeam::run_part(int part) noexcept {
  const std::int64_t begin = count_ * part / num_parts_;
  const std::int64_t end = count_ * (part + 1) / num_parts_;
  try {
    if (begin < end) {
      (*body_)(begin, end);
    }
  } catch (...) {
    const std::lock_guard lock(task_mutex_);
    if (!first_error_) {
      first_error_ = std::current_exception();
    }
  }
}

void ThreadTeam::run(std::int64_t count, std::int64_t grain,
                     const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) {
    return;
  }
  const auto most_parts = (count + std::max<std::int64_t>(grain, 1) - 1) / std::max<std::int64_t>(grain, 1);
  {
    const std::lock_guard lock(task_mutex_);
    count_ = count;
    body_ = &body;
    num_parts_ = static_cast<int>(std::min<std::int64_t>(most_parts, num_threads()));
    parts_left_ = num_parts_ - 1;
    first_error_ = nullptr;
    ++generation_;
  }
  task_changed_.notify_all();
  run_part(0);
  std::unique_lock lock(task_mutex_);
  task_changed_.wait(lock, [this] { return parts_left_ == 0; });
  body_ = nullptr;
  if (first_error_) {
    std::rethrow_exception(first_error_);
  }
}

ParallelFor ThreadTeam::parallel_for() {
  return [this](std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
    run(count, grain, body);
  };
}

void ThreadTeam::work(const std::stop_token& stop, int index) {
  std::uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(task_mutex_);
      if (!task_changed_.wait(lock, stop, [&] { return generation_ != seen; })) {
        return;
      }
      seen = generation_;
      if (index >= num_parts_) {
        continue;
      }
    }
    run_part(index);
    {
      const std::lock_guard lock(task_mutex_);
      --parts_left_;
    }
    task_changed_.notify_all();
  }
}

}  // namespace pannier
