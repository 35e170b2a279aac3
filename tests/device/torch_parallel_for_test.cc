#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

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

TEST(HostThreads, AreARanksShareOfTheCoresWhereTorchrunLeftItOne) {
  std::map<std::string, std::string> variables;
  const auto environment = [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  at::set_num_threads(1);
  EXPECT_EQ(host_threads(environment, 16), 1);
  variables = {{"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(host_threads(environment, 16), 1);
  variables["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(host_threads(environment, 16), 8);
  EXPECT_EQ(host_threads(environment, 1), 1);
  variables["LOCAL_WORLD_SIZE"] = "1";
  EXPECT_EQ(host_threads(environment, 16), 1);
  variables["LOCAL_WORLD_SIZE"] = "2";
  at::set_num_threads(3);
  EXPECT_EQ(host_threads(environment, 16), 3);
}

TEST(TorchParallelFor, PassesAnExceptionOn) {
  at::set_num_threads(2);
  EXPECT_THROW(
      torch_parallel_for()(2, 1, [](std::int64_t, std::int64_t) { throw std::runtime_error("from a worker"); }),
      std::runtime_error);
}

TEST(TorchParallelFor, KeepsToFewerThreadsAndCoversEverything) {
  at::set_num_threads(4);
  for (const int most : {1, 2, 3, 100}) {
    for (const std::int64_t count : {0, 1, 7, 1000}) {
      std::mutex mutex;
      std::set<std::thread::id> threads;
      std::vector<int> seen(static_cast<std::size_t>(count));
      torch_parallel_for(most)(count, 3, [&](std::int64_t begin, std::int64_t end) {
        const std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
        EXPECT_LE(end - begin, 3);
        for (std::int64_t i = begin; i < end; ++i) {
          ++seen[static_cast<std::size_t>(i)];
        }
      });
      EXPECT_EQ(seen, std::vector<int>(static_cast<std::size_t>(count), 1));
      EXPECT_LE(threads.size(), static_cast<std::size_t>(most));
    }
  }
}

TEST(TorchParallelFor, ATeamThatFailsEndsAndPassesTheErrorOn) {
  at::set_num_threads(2);
  std::atomic<int> num_pieces{0};
  EXPECT_THROW(torch_parallel_for(2)(1'000'000, 1,
                                     [&](std::int64_t, std::int64_t) {
                                       ++num_pieces;
                                       throw std::runtime_error("from a worker");
                                     }),
               std::runtime_error);
  EXPECT_LE(num_pieces, 2);
}

}  // namespace
}  // namespace pannier
