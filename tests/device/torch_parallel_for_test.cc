#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>

#include "pannier/device/compute.h"

namespace pannier {
namespace {

TEST(TorchParallelFor, UsesTorchsThreads) {
  at::set_num_threads(2);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::int64_t covered = 0;
  torch_parallel_for()(2, 1, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    covered += end - begin;
  });
  EXPECT_EQ(covered, 2);
  EXPECT_EQ(threads.size(), 2U);
}

TEST(TorchParallelFor, PassesAnExceptionOn) {
  at::set_num_threads(2);
  EXPECT_THROW(
      torch_parallel_for()(2, 1, [](std::int64_t, std::int64_t) { throw std::runtime_error("from a worker"); }),
      std::runtime_error);
}

}  // namespace
}  // namespace pannier
