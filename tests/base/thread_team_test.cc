#include "pannier/base/thread_team.h"

#include <gmock/gmock.h>

#include <atomic>
#include <vector>

#include "pannier/base/error.h"

namespace pannier {
namespace {

TEST(ThreadTeam, CoversEveryIndexOnce) {
  ThreadTeam team(4);
  for (const std::int64_t count : {0, 1, 3, 4, 5, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
    team.run(count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) {
        ++seen[static_cast<std::size_t>(i)];
      }
    });
    for (const auto& times : seen) {
      EXPECT_EQ(times, 1);
    }
  }
}

TEST(ThreadTeam, KeepsRangesAtLeastAGrain) {
  ThreadTeam team(8);
  std::atomic<int> ranges{0};
  team.run(100, 60, [&](std::int64_t, std::int64_t) { ++ranges; });
  EXPECT_EQ(ranges, 2);
}

TEST(ThreadTeam, RethrowsAndStaysUsable) {
  ThreadTeam team(3);
  EXPECT_THROW(team.run(3, 1,
                        [](std::int64_t begin, std::int64_t) {
                          if (begin == 1) {
                            throw ConfigError("second part");
                          }
                        }),
               ConfigError);
  std::atomic<std::int64_t> sum{0};
  team.run(10, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 10);
}

TEST(ThreadTeam, NeedsOneThread) { EXPECT_THROW(ThreadTeam(0), InternalError); }

}  // namespace
}  // namespace pannier
