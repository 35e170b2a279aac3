// Runs a test's ranks as threads, under a watchdog: a rank that throws fails the others' waits, and one that hangs
// fails the whole program, so that no test ever waits for ever.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "pannier/comm/thread_group.h"

namespace pannier::testing {

/// Calls `body` with each rank's communicator, each in a thread of its own; returns what each rank threw, null if
/// nothing. Ends the program when the ranks are not done after `watchdog`.
inline std::vector<std::exception_ptr> run_each(ThreadGroup& group, const std::function<void(Communicator&)>& body,
                                                std::exception_ptr* first = nullptr,
                                                std::chrono::seconds watchdog = std::chrono::seconds(120)) {
  std::mutex mutex;  // Guards what follows.
  std::condition_variable changed;
  int num_running = group.world_size();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(num_running));
  const auto run = [&](int rank) {
    std::exception_ptr error;
    try {
      body(group.communicator(rank));
    } catch (const std::exception& exception) {
      error = std::current_exception();
      if (first != nullptr) {
        const std::lock_guard lock(mutex);
        *first = *first ? *first : error;
      }
      group.communicator(rank).report_failure(exception.what());
    }
    const std::lock_guard lock(mutex);
    errors[static_cast<std::size_t>(rank)] = error;
    --num_running;
    changed.notify_all();
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    threads.emplace_back(run, rank);
  }
  std::unique_lock lock(mutex);
  if (!changed.wait_until(lock, std::chrono::system_clock::now() + watchdog, [&] { return num_running == 0; })) {
    std::fputs("run_ranks: the ranks hang\n", stderr);
    std::abort();
  }
  return errors;
}

/// Runs `body` on every rank and rethrows what the first one that failed threw.
inline void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
                      const GroupOptions& options = thread_group_options()) {
  ThreadGroup group(world_size, options);
  std::exception_ptr first;
  run_each(group, body, &first);
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace pannier::testing
