#include "pannier/tier/nvme_state_store.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <random>
#include <thread>

#include "pannier/base/error.h"
#include "pannier/io/faulty_disk.h"
#include "pannier/layout/bucket_layout.h"
#include "pannier/tier/chunk_cursor.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const StateShape kBf16{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};
const std::vector<std::int64_t> kNumels{10'000, 3 * kBlockNumel + 1, 0, 5};
constexpr std::size_t kChunkBytes = 12 * static_cast<std::size_t>(kBlockNumel);

class NvmeStates : public testing::TestWithParam<IoEngineKind> {
 protected:
  NvmeStateOptions options(std::size_t num_buffers = 4) {
    return {.folders = {folder_.path()},
            .buffer_count = num_buffers,
            .buffer_nbytes = 2 * kChunkBytes,
            .engine = GetParam(),
            .hook = &disk_,
            .label = [](int bucket, const ElementRange& range) { return fmt_label(bucket, range.begin); }};
  }
  static std::string fmt_label(int bucket, std::int64_t begin) {
    return "weight " + std::to_string(bucket) + " from " + std::to_string(begin);
  }
  std::unique_ptr<NvmeStateStore> make(const NvmeStateOptions& options) {
    return std::make_unique<NvmeStateStore>(memory_, kBf16, kNumels, options);
  }
  static std::vector<ChunkId> all_chunks(const StateStore& store, bool back) {
    std::vector<ChunkId> chunks;
    for (int b = store.num_buckets() - 1; b >= 0; --b) {
      for (int c = 0; c < store.num_chunks(b); ++c) {
        chunks.push_back({b, c});
      }
    }
    if (back) {
      std::reverse(chunks.begin(), chunks.end());
    }
    return chunks;
  }
  // Each element of each array as it is after `round` rounds.
  static float value(int bucket, std::int64_t element, int round, int array) {
    return static_cast<float>(bucket * 1'000'000 + element * 8 + round * 3 + array);
  }
  static bool holds(const StateView& view, int bucket, int round) {
    const auto* rest = static_cast<const std::uint16_t*>(view.rest);
    const auto* param = static_cast<const std::uint16_t*>(view.param);
    for (std::int64_t e = view.range.begin; e < view.range.end; ++e) {
      const std::int64_t i = e - view.range.begin;
      if (round == 0 ? view.state1[i] != 0.0F || view.state2[i] != 0.0F || rest[i] != 0 || param[i] != 0
                     : view.state1[i] != value(bucket, e, round, 0) || view.state2[i] != value(bucket, e, round, 1) ||
                           rest[i] != static_cast<std::uint16_t>(e + round) ||
                           param[i] != static_cast<std::uint16_t>(e * 3 + round)) {
        return false;
      }
    }
    return true;
  }
  static void fill(const StateView& view, int bucket, int round) {
    for (std::int64_t e = view.range.begin; e < view.range.end; ++e) {
      const std::int64_t i = e - view.range.begin;
      view.state1[i] = value(bucket, e, round, 0);
      view.state2[i] = value(bucket, e, round, 1);
      static_cast<std::uint16_t*>(view.rest)[i] = static_cast<std::uint16_t>(e + round);
      static_cast<std::uint16_t*>(view.param)[i] = static_cast<std::uint16_t>(e * 3 + round);
    }
  }
  // One step: what `round - 1` rounds left becomes what `round` rounds leave. Goes on at `done` after an error.
  static void step(StateStore& store, int round, bool back, std::size_t& done) {
    const std::vector<ChunkId> chunks = all_chunks(store, back);
    store.expect({chunks.begin() + static_cast<std::ptrdiff_t>(done), chunks.end()});
    for (; done < chunks.size(); ++done) {
      const Lease lease = store.lease(chunks[done]);
      ASSERT_TRUE(holds(lease.view(), chunks[done].bucket, round - 1)) << done;
      fill(lease.view(), chunks[done].bucket, round);
    }
  }
  static void step(StateStore& store, int round, bool back) {
    std::size_t done = 0;
    step(store, round, back, done);
  }
  static void expect_round(StateStore& store, int round) {
    for (const ChunkId chunk : all_chunks(store, false)) {
      const Lease lease = store.lease(chunk, Access::kRead);
      EXPECT_TRUE(holds(lease.view(), chunk.bucket, round)) << chunk.bucket << " " << chunk.chunk;
    }
  }

  TemporaryFolder folder_;
  HostMemory memory_;
  FaultyDisk disk_;
};

TEST_P(NvmeStates, ChunksCoverEveryElementOnce) {
  const auto store = make(options());
  EXPECT_EQ(store->num_chunks(2), 0);
  EXPECT_EQ(store->num_chunks(1), 4);
  for (int b = 0; b < store->num_buckets(); ++b) {
    std::int64_t at = 0;
    for (int c = 0; c < store->num_chunks(b); ++c) {
      EXPECT_EQ(store->range({b, c}).begin, at);
      at = store->range({b, c}).end;
      EXPECT_EQ(store->chunk_of(b, at - 1), (ChunkId{b, c}));
    }
    EXPECT_EQ(at, kNumels[static_cast<std::size_t>(b)]);
  }
  EXPECT_THROW((void)store->lease({2, 0}), InternalError);
}

TEST_P(NvmeStates, HoldWhatWasWrittenWithFewBuffersAndMany) {
  for (const std::size_t num_buffers : {1, 2, 10}) {
    const auto store = make(options(num_buffers));
    for (int round = 1; round <= 6; ++round) {
      step(*store, round, round % 3 == 0);
      if (round == 4) {
        store->settle();
      }
    }
    expect_round(*store, 6);
    EXPECT_LE(memory_.current_bytes(), num_buffers * 2 * kChunkBytes);
  }
  EXPECT_THAT(folder_.names(), IsEmpty());
}

TEST_P(NvmeStates, MoveEachByteOnceEachWayButForWhatTheBuffersKept) {
  const auto store = make(options(1));
  step(*store, 1, false);
  store->settle();
  const NvmeStats before = store->stats();
  step(*store, 2, false);
  store->settle();
  const NvmeStats same_way = store->stats();
  EXPECT_EQ(same_way.written_nbytes - before.written_nbytes, store->staging().file_nbytes);
  EXPECT_GE(same_way.read_nbytes - before.read_nbytes,
            store->staging().file_nbytes - store->staging().staging_nbytes());
  step(*store, 3, true);
  store->settle();
  const NvmeStats back = store->stats();
  EXPECT_EQ(back.written_nbytes - same_way.written_nbytes, store->staging().file_nbytes);
  EXPECT_LT(back.read_nbytes - same_way.read_nbytes, store->staging().file_nbytes);
}

TEST_P(NvmeStates, WriteNothingForALeaseThatOnlyReads) {
  const auto store = make(options(1));
  step(*store, 1, false);
  store->settle();
  const std::uint64_t written = store->stats().written_nbytes;
  expect_round(*store, 1);
  store->settle();
  EXPECT_EQ(store->stats().written_nbytes, written);
}

TEST_P(NvmeStates, KeepAPartInHostMemoryOnRequest) {
  NvmeStateOptions some = options(1);
  some.host_nbytes = 3 * kChunkBytes;
  const auto store = make(some);
  const auto all = make(options(1));
  EXPECT_EQ(store->staging().host_chunks, 3U);
  EXPECT_EQ(store->staging().file_nbytes, all->staging().file_nbytes - 2 * kChunkBytes - 4096);
  for (int round = 1; round <= 3; ++round) {
    step(*store, round, false);
  }
  expect_round(*store, 3);
  some.host_nbytes = std::size_t{1} << 30;
  EXPECT_EQ(make(some)->stats().written_nbytes, 0U);
}

TEST_P(NvmeStates, SurviveShortAndLateResults) {
  disk_.add({.kind = FaultKind::kShort, .on_read = true, .on_write = true, .times = 40, .nbytes = 4096});
  disk_.add({.kind = FaultKind::kDelay,
             .on_read = true,
             .on_write = true,
             .skip = 10,
             .times = 20,
             .delay = std::chrono::milliseconds(20)});
  const auto store = make(options(2));
  for (int round = 1; round <= 3; ++round) {
    step(*store, round, false);
  }
  expect_round(*store, 3);
}

TEST_P(NvmeStates, AWriteThatFailsIsToldAndTriedAgain) {
  for (const std::size_t skip : {0, 1, 3, 6}) {
    disk_.clear();
    const auto store = make(options(1));
    step(*store, 1, false);
    store->settle();
    disk_.add({.on_write = true, .skip = skip, .times = 2, .error_number = ENOSPC});
    std::size_t done = 0;
    int num_errors = 0;
    for (int attempt = 0; attempt < 10; ++attempt) {
      try {
        step(*store, 2, false, done);
        store->settle();
        break;
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("write of extent"), HasSubstr("weight "), HasSubstr("No space left")));
        ++num_errors;
      }
    }
    EXPECT_GE(num_errors, 1) << skip;
    EXPECT_LE(num_errors, 2) << skip;
    expect_round(*store, 2);
  }
}

TEST_P(NvmeStates, AReadThatFailsHarmsNothing) {
  const auto store = make(options(1));
  step(*store, 1, false);
  store->settle();
  disk_.add({.on_read = true, .skip = 1, .times = 2});
  std::size_t done = 0;
  int num_errors = 0;
  for (int attempt = 0; attempt < 10 && done < all_chunks(*store, false).size(); ++attempt) {
    try {
      step(*store, 2, false, done);
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("read of extent"), HasSubstr("weight ")));
      ++num_errors;
    }
  }
  EXPECT_GE(num_errors, 1);  // Both may hit what is read at the same time.
  EXPECT_LE(num_errors, 2);
  expect_round(*store, 2);
}

TEST_P(NvmeStates, AFlippedBitIsFoundAndNamesWhatItWasIn) {
  const auto store = make(options(1));
  step(*store, 1, false);
  store->settle();
  disk_.add({.kind = FaultKind::kFlipBit, .on_read = true, .times = 1, .bit = 123});
  std::size_t done = 0;
  try {
    step(*store, 2, false, done);
    ADD_FAILURE() << "a wrong bit went unseen";
  } catch (const ChecksumError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("wrong checksum"), HasSubstr("weight "), HasSubstr(" from ")));
  }
  EXPECT_EQ(disk_.num_hits(), 1U);
  step(*store, 2, false, done);
  expect_round(*store, 2);
}

// One step by who computes the sums himself.
TEST_P(NvmeStates, TakeSumsOfTilesFromWhoUpdates) {
  const auto store = make(options(1));
  const auto sum = [&](ChunkId chunk) {
    std::uint64_t all = 0;
    for (std::int64_t tile = 0; tile * store->tile_numel() < store->range(chunk).numel(); ++tile) {
      all += store->tile_sum(chunk, tile);
    }
    return all;
  };
  const auto update = [&](ChunkId chunk, int round) {
    const Lease lease = store->lease(chunk, Access::kTiles);
    const std::uint64_t before = sum(chunk);
    fill(lease.view(), chunk.bucket, round);
    store->confirm(chunk, before, sum(chunk));
  };
  for (int round = 1; round <= 3; ++round) {
    for (const ChunkId chunk : all_chunks(*store, false)) {
      update(chunk, round);
    }
  }
  store->settle();
  expect_round(*store, 3);
  disk_.add({.kind = FaultKind::kFlipBit, .on_read = true, .times = 1, .bit = 123});
  const ChunkId first = all_chunks(*store, false).front();
  EXPECT_THROW(update(first, 4), ChecksumError);
  for (const ChunkId chunk : all_chunks(*store, false)) {
    update(chunk, 4);
  }
  store->settle();
  expect_round(*store, 4);
  {
    const Lease unconfirmed = store->lease(first, Access::kTiles);
  }
  expect_round(*store, 4);
}

TEST_P(NvmeStates, TakeShardsOfAllOddSizes) {
  for (const std::int64_t numel : {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, kBlockNumel - 1, kBlockNumel,
                                   kBlockNumel + 1, 2 * kBlockNumel, 3 * kBlockNumel - 1, 3 * kBlockNumel}) {
    NvmeStateStore store(memory_, kBf16, {numel}, options(1));
    for (int round = 1; round <= 3; ++round) {
      step(store, round, false);
    }
    expect_round(store, 3);
  }
}

TEST_P(NvmeStates, ACursorSharesLeasesBetweenRuns) {
  const auto store = make(options(1));
  std::vector<std::pair<std::int64_t, std::int64_t>> parts;
  ChunkCursor cursor(*store, 0, Access::kUpdate);
  const auto note = [&](const StateView&, const ElementRange& part) { parts.emplace_back(part.begin, part.end); };
  cursor.visit({10, 10}, note);
  cursor.visit({10, 5000}, note);
  cursor.visit({5000, 10'000}, note);
  EXPECT_THAT(parts, testing::ElementsAre(std::pair(10, 4096), std::pair(4096, 5000), std::pair(5000, 8192),
                                          std::pair(8192, 10'000)));
  EXPECT_THROW((void)store->lease({0, 2}), InternalError);
  cursor.close();
  EXPECT_NO_THROW((void)store->lease({0, 2}));
}

TEST_P(NvmeStates, ASecondRunIsRefusedAndNamesTheFirst) {
  const auto store = make(options());
  EXPECT_EQ(in_child([&] {
              try {
                FolderLock lock(folder_.path(), {.wait_seconds = 0});
              } catch (const IoError& error) {
                return std::string(error.what()).find(std::to_string(::getppid())) == std::string::npos ? 2 : 0;
              }
              return 1;
            }),
            0);
}

// Children take steps in one folder, one after the other, each until it is killed: while it takes the lock, sets the
// file aside, reads, or writes.
TEST_P(NvmeStates, AreTakenOverFromRunsThatWereKilledAtAnyMoment) {
  constexpr int kKills = 25;  // With each of two engines.
  std::mt19937 random(GetParam() == IoEngineKind::kAuto ? 1 : 2);
  std::uniform_int_distribution<int> moment_us(0, 60'000);
  for (int i = 0; i < kKills; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      at::set_num_threads(1);  // A forked child has none of its parent's.
      try {
        const auto store = make(options(2));
        for (int round = 1;; ++round) {
          step(*store, round, round % 2 == 0);
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(moment_us(random)));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the run after kill " << i << " could not begin";
  }
  {
    const auto store = make(options(2));
    step(*store, 1, false);
    expect_round(*store, 1);
  }
  EXPECT_THAT(folder_.names(), IsEmpty());
}

TEST_P(NvmeStates, SayBytesWantedAndFreeWhenThereIsNoRoomAndTakeNoMemory) {
  try {
    NvmeStateStore store(memory_, kBf16, {std::int64_t{1} << 42}, {.folders = {folder_.path()}});
    ADD_FAILURE() << "48 TiB were set aside";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOSPC);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder_.path()), HasSubstr("free")));
  }
  EXPECT_EQ(memory_.peak_bytes(), 0U);
  EXPECT_THAT(folder_.names(), IsEmpty());
}

TEST_P(NvmeStates, SayWhatABufferMustHold) {
  NvmeStateOptions small = options();
  small.buffer_nbytes = 2 * kChunkBytes - 1;
  EXPECT_THROW((void)make(small), ConfigError);
}

INSTANTIATE_TEST_SUITE_P(Engines, NvmeStates, testing::Values(IoEngineKind::kAuto, IoEngineKind::kThreads),
                         [](const auto& param) { return param.param == IoEngineKind::kAuto ? "Auto" : "Threads"; });

}  // namespace
}  // namespace pannier
