#include "pannier/io/staging.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <thread>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/disk_file.h"
#include "pannier/io/extent_table.h"

namespace pannier {
namespace {

TEST(StagingPool, LendsAlignedBuffersThatHostMemoryCounts) {
  HostMemory memory;
  {
    StagingPool pool(memory, {.buffer_count = 3, .buffer_size = 10000, .owner = "staging"});
    EXPECT_EQ(pool.buffer_nbytes(), 12288U);
    EXPECT_EQ(memory.stats().by_owner.at("staging").current_bytes, pool.mapped_bytes());
    auto a = pool.acquire();
    const auto b = pool.acquire();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data().data()) % kIoAlignment, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data().data()) % kIoAlignment, 0U);
    EXPECT_NE(a.data().data(), b.data().data());
    EXPECT_EQ(pool.num_free(), 1U);
    const auto moved = std::move(a);
    EXPECT_FALSE(a.is_held());  // NOLINT(bugprone-use-after-move): that is the promise.
    EXPECT_TRUE(moved.is_held());
    EXPECT_EQ(pool.num_free(), 1U);
    a = pool.acquire();
    EXPECT_FALSE(pool.try_acquire().has_value());
    EXPECT_EQ(pool.peak_in_use(), 3U);
  }
  EXPECT_EQ(memory.current_bytes(), 0U);
}

TEST(StagingPool, MakesTheNextWaitForAFreeBuffer) {
  HostMemory memory;
  StagingPool pool(memory, {.buffer_count = 1, .buffer_size = 4096});
  auto held = pool.acquire();
  auto* const address = held.data().data();
  std::thread giver([buffer = std::move(held)]() mutable { buffer.give_back(); });
  EXPECT_EQ(pool.acquire().data().data(), address);
  giver.join();
  EXPECT_EQ(pool.num_free(), 1U);
}

TEST(StagingPool, WakesWaitersWithAnErrorWhenClosed) {
  HostMemory memory;
  StagingPool pool(memory, {.buffer_count = 1, .buffer_size = 4096});
  const auto held = pool.acquire();
  std::thread closer([&] { pool.close(); });
  EXPECT_THROW(static_cast<void>(pool.acquire()), InternalError);
  closer.join();
  EXPECT_FALSE(pool.try_acquire().has_value());
}

TEST(StagingPool, CutsNoBufferBetweenRegions) {
  HostMemory memory;
  StagingPool pool(memory, {.buffer_count = 5, .buffer_size = 8192});
  std::size_t total = 0;
  for (const auto region : pool.regions()) {
    EXPECT_EQ(region.size() % 8192, 0U);
    total += region.size();
  }
  EXPECT_EQ(total, 5U * 8192);
}

TEST(StagingPool, RefusesWhatIsNoSize) {
  HostMemory memory({.budget_bytes = 1 << 20});
  EXPECT_THROW(StagingPool(memory, {.buffer_count = 0}), ConfigError);
  EXPECT_THROW(StagingPool(memory, {.buffer_size = 0}), ConfigError);
  EXPECT_THROW(StagingPool(memory, {.buffer_count = 2, .buffer_size = 1 << 20}), OutOfMemoryError);
}

TEST(ExtentTable, LaysExtentsOutInOrderWithoutOverlap) {
  ExtentTable table;
  for (const std::size_t nbytes : {0, 1, 4095, 4096, 4097, 12289}) {
    table.add("p", nbytes);
  }
  std::size_t end = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(table.at(i).offset, end);
    EXPECT_EQ(table.at(i).offset % kIoAlignment, 0U);
    end += padded_bytes(table.at(i).nbytes);
  }
  EXPECT_EQ(table.file_bytes(), end);
  EXPECT_EQ(table.max_padded_bytes(), 16384U);
}

TEST(ExtentTable, CutsLargeStateIntoPieces) {
  ExtentTable table;
  table.add("first", 100);
  const auto range = table.add_in_pieces("large", 3 * 8192 + 5, 8192);
  EXPECT_EQ(range.first, 1U);
  EXPECT_EQ(range.last, 5U);
  EXPECT_EQ(table.at(4).nbytes, 5U);
  const auto none = table.add_in_pieces("none", 0, 8192);
  EXPECT_EQ(none.last - none.first, 1U);
  const auto exact = table.add_in_pieces("exact", 16384, 8192);
  EXPECT_EQ(exact.last - exact.first, 2U);
  EXPECT_THROW(table.add_in_pieces("odd", 10, 100), InternalError);
}

}  // namespace
}  // namespace pannier
