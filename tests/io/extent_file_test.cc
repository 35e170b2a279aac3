#include "pannier/io/extent_file.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "pannier/io/checksum.h"
#include "pannier/io/faulty_disk.h"
#include "pannier/io/staging.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
}

std::vector<std::byte> pattern(std::size_t nbytes, std::uint64_t seed) {
  std::vector<std::byte> bytes(nbytes);
  fill(bytes, seed);
  return bytes;
}

// All that a tier puts together, with a disk that can be made to fail.
struct Bench {
  Bench(IoEngineKind kind, const ExtentTable& table, IoEngineOptions options = {}, std::size_t num_folders = 1)
      : pool(memory, {.buffer_count = 8, .buffer_size = std::max<std::size_t>(table.max_padded_bytes(), 1)}),
        file(file_options(table.file_bytes(), num_folders)) {
    options.kind = kind;
    options.hook = &disk;
    options.buffers = pool.regions();
    engine = make_io_engine(file, options);
    extents = std::make_unique<ExtentFile>(table, *engine);
  }
  DiskFileOptions file_options(std::size_t nbytes, std::size_t num_folders) {
    DiskFileOptions options{.folders = {first.path()}, .nbytes = nbytes, .stripe_nbytes = 8192};
    if (num_folders > 1) {
      options.folders.push_back(second.path());
    }
    return options;
  }
  void write(std::size_t index, std::span<const std::byte> bytes) {
    const auto buffer = pool.acquire();
    std::copy(bytes.begin(), bytes.end(), buffer.data().begin());
    extents->write(index, buffer.data()).wait_done();
  }
  std::vector<std::byte> read(std::size_t index) {
    const auto buffer = pool.acquire();
    extents->read(index, buffer.data()).wait_done();
    const auto nbytes = extents->table().at(index).nbytes;
    return {buffer.data().begin(), buffer.data().begin() + static_cast<std::ptrdiff_t>(nbytes)};
  }

  TemporaryFolder first;
  TemporaryFolder second;
  HostMemory memory;
  StagingPool pool;
  DiskFile file;
  FaultyDisk disk;
  std::unique_ptr<IoEngine> engine;
  std::unique_ptr<ExtentFile> extents;
};

ExtentTable one_extent(std::size_t nbytes, const std::string& label = "layer.weight") {
  ExtentTable table;
  table.add(label, nbytes);
  return table;
}

// The kinds that this machine allows: the thread engine always, io_uring where the kernel does.
std::vector<IoEngineKind> kinds() {
  const TemporaryFolder folder;
  const DiskFile file({.folders = {folder.path()}, .nbytes = 4096});
  const bool has_uring = std::string(make_io_engine(file)->name()) == "io_uring";
  return has_uring ? std::vector{IoEngineKind::kThreads, IoEngineKind::kUring} : std::vector{IoEngineKind::kThreads};
}

class Engines : public ::testing::TestWithParam<IoEngineKind> {};
INSTANTIATE_TEST_SUITE_P(Both, Engines, ::testing::ValuesIn(kinds()),
                         [](const auto& one) { return one.param == IoEngineKind::kUring ? "uring" : "threads"; });

TEST_P(Engines, ReturnsEveryOddSizeAsItWasWritten) {
  std::vector<std::size_t> sizes = {1};
  for (const std::size_t blocks : {0, 1, 2, 3}) {
    for (const std::size_t nbytes : {blocks * 4096 - 1, blocks * 4096, blocks * 4096 + 1}) {
      if (nbytes <= 3 * 4096 + 1) {
        sizes.push_back(nbytes);
      }
    }
  }
  ExtentTable table;
  for (const auto nbytes : sizes) {
    table.add("p" + std::to_string(nbytes), nbytes);
  }
  for (const std::size_t num_folders : {1, 2}) {
    Bench bench(GetParam(), table, {.piece_nbytes = 4096}, num_folders);
    for (std::size_t round = 0; round < 2; ++round) {
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        bench.write(i, pattern(sizes[i], i + 100 * round));
      }
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        EXPECT_EQ(bench.read(i), pattern(sizes[i], i + 100 * round)) << sizes[i];
        EXPECT_EQ(bench.extents->num_writes(i), round + 1);
      }
    }
  }
}

TEST_P(Engines, KeepsManyExtentsInFlightAndCountsTheirBytes) {
  constexpr std::size_t kCount = 64;
  constexpr std::size_t kBytes = std::size_t{256} << 10;
  ExtentTable table;
  for (std::size_t i = 0; i < kCount; ++i) {
    table.add("extent", kBytes);
  }
  Bench bench(GetParam(), table, {.piece_nbytes = 64 << 10, .depth = 16}, 2);
  // The first pieces lag, so that those of other extents meet them.
  bench.disk.add({.kind = FaultKind::kDelay, .on_write = true, .times = 4, .delay = std::chrono::milliseconds(5)});
  HostSlab all(bench.memory, kCount * kBytes, {.owner = "test"});
  fill(all.data(), 7);
  const std::vector<std::byte> written(all.data().begin(), all.data().end());
  std::vector<ExtentTransfer> transfers;
  for (std::size_t i = 0; i < kCount; ++i) {
    transfers.push_back(bench.extents->write(i, all.data().subspan(i * kBytes, kBytes)));
  }
  for (auto& transfer : transfers) {
    transfer.wait_done();
    EXPECT_TRUE(transfer.is_done());
  }
  transfers.clear();
  std::fill(all.data().begin(), all.data().end(), std::byte{0});
  for (std::size_t i = kCount; i-- > 0;) {
    transfers.push_back(bench.extents->read(i, all.data().subspan(i * kBytes, kBytes)));
  }
  for (auto& transfer : transfers) {
    transfer.wait_done();
  }
  EXPECT_TRUE(std::equal(written.begin(), written.end(), all.data().begin()));
  const IoStats stats = bench.engine->stats();
  EXPECT_EQ(stats.written_bytes, kCount * kBytes);
  EXPECT_EQ(stats.read_bytes, kCount * kBytes);
  EXPECT_EQ(stats.reads, kCount);
  EXPECT_EQ(stats.writes, kCount);
  EXPECT_GT(stats.max_in_flight, 4U);
  EXPECT_LE(stats.max_in_flight, 16U);
}

TEST_P(Engines, ServesTwoThreadsAtOnce) {
  constexpr std::size_t kCount = 24;
  ExtentTable table;
  for (std::size_t i = 0; i < kCount; ++i) {
    table.add("extent", 10000 + i);
  }
  Bench bench(GetParam(), table, {.piece_nbytes = 4096, .depth = 4});
  const auto work = [&](std::size_t first) {
    for (std::size_t i = first; i < kCount; i += 2) {
      for (std::uint64_t round = 0; round < 3; ++round) {
        bench.write(i, pattern(10000 + i, i * 10 + round));
        EXPECT_EQ(bench.read(i), pattern(10000 + i, i * 10 + round));
      }
    }
  };
  std::thread other([&] { work(1); });
  work(0);
  other.join();
}

TEST_P(Engines, ContinuesShortTransfers) {
  for (const std::size_t moved : {1, 4095, 4096, 5000, 12288}) {
    Bench bench(GetParam(), one_extent(100001), {.piece_nbytes = 16384});
    bench.disk.add({.kind = FaultKind::kShort, .on_read = true, .on_write = true, .times = 9, .nbytes = moved});
    bench.write(0, pattern(100001, moved));
    bench.disk.add({.kind = FaultKind::kShort, .on_read = true, .times = 9, .nbytes = moved});
    EXPECT_EQ(bench.read(0), pattern(100001, moved));
    EXPECT_GT(bench.engine->stats().short_results, 9U);
    EXPECT_EQ(bench.engine->stats().read_bytes, padded_bytes(100001));
  }
}

TEST_P(Engines, GivesUpOnADiskThatMovesNothing) {
  Bench bench(GetParam(), one_extent(4096));
  bench.disk.add({.kind = FaultKind::kShort, .on_write = true, .nbytes = 0});
  EXPECT_THROW(bench.write(0, pattern(4096, 1)), IoError);
  EXPECT_EQ(bench.extents->state(0), ExtentState::kDirty);
}

TEST_P(Engines, NamesFileOffsetBytesAndReasonOfAFailure) {
  ExtentTable table = one_extent(4096);
  table.add("layer.1.bias", 20000);
  for (const int error_number : {EIO, ENOSPC}) {
    Bench bench(GetParam(), table, {.piece_nbytes = 4096});
    bench.write(1, pattern(20000, 1));
    bench.disk.add({.on_write = true, .skip = 2, .times = 1, .error_number = error_number});
    const auto buffer = bench.pool.acquire();
    fill(buffer.data(), 2);
    auto transfer = bench.extents->write(1, buffer.data());
    transfer.wait_ended();
    EXPECT_EQ(bench.extents->state(1), ExtentState::kDirty);
    try {
      transfer.wait_done();
      FAIL() << "the write failed, and nobody said so";
    } catch (const IoError& error) {
      EXPECT_EQ(error.error_number(), error_number);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("layer.1.bias"), HasSubstr(bench.first.path()), HasSubstr("offset"),
                                      HasSubstr("4096 bytes"), HasSubstr(std::strerror(error_number))));
    }
    // What is on disk is neither old nor new, so nobody may read it until it has been written again from its buffer.
    EXPECT_THROW(static_cast<void>(bench.extents->read(1, buffer.data())), InternalError);
    const std::vector<std::byte> kept(buffer.data().begin(), buffer.data().begin() + 20000);
    bench.extents->write(1, buffer.data()).wait_done();
    EXPECT_EQ(bench.read(1), kept);
  }
}

TEST_P(Engines, FailsAReadAndServesTheNext) {
  Bench bench(GetParam(), one_extent(50000), {.piece_nbytes = 4096, .depth = 3});
  bench.write(0, pattern(50000, 1));
  bench.disk.add({.on_read = true, .skip = 1, .times = 1});
  EXPECT_THROW(static_cast<void>(bench.read(0)), IoError);
  EXPECT_EQ(bench.extents->state(0), ExtentState::kClean);
  EXPECT_EQ(bench.read(0), pattern(50000, 1));
}

TEST_P(Engines, FindsAFlippedBitAndNamesExtentAndLabel) {
  Bench bench(GetParam(), one_extent(50000), {.piece_nbytes = 4096});
  bench.write(0, pattern(50000, 1));
  bench.disk.add({.kind = FaultKind::kFlipBit, .on_read = true, .skip = 3, .times = 1, .bit = 1234});
  try {
    static_cast<void>(bench.read(0));
    FAIL() << "a flipped bit went unseen";
  } catch (const ChecksumError& error) {
    EXPECT_EQ(error.extent(), 0U);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("extent 0"), HasSubstr("layer.weight"), HasSubstr("checksum")));
  }
  EXPECT_EQ(bench.disk.num_hits(), 1U);
}

TEST_P(Engines, FindsAWriteThatNeverReachedTheDisk) {
  Bench bench(GetParam(), one_extent(8192));
  bench.write(0, pattern(8192, 1));
  const auto buffer = bench.pool.acquire();
  auto old = bench.extents->read(0, buffer.data());
  old.wait_done();
  bench.write(0, pattern(8192, 2));
  // The old bytes come back, as from a disk that acknowledged and lost the new ones.
  ASSERT_EQ(::pwrite(bench.file.fd(0), buffer.data().data(), 8192, 0), 8192);
  EXPECT_THROW(static_cast<void>(bench.read(0)), ChecksumError);
}

TEST_P(Engines, NamesSizesOfATruncatedFile) {
  Bench bench(GetParam(), one_extent(100000));
  bench.write(0, pattern(100000, 1));
  ASSERT_EQ(::ftruncate(bench.file.fd(0), 8192), 0);
  try {
    static_cast<void>(bench.read(0));
    FAIL() << "a truncated file went unseen";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the file has 8192"), HasSubstr("layer.weight")));
  }
}

TEST_P(Engines, LetsTheCallerHashItsTiles) {
  const std::size_t nbytes = 3 * kChecksumTileBytes + 77;
  Bench bench(GetParam(), one_extent(nbytes));
  const auto bytes = pattern(nbytes, 5);
  std::uint64_t sum = 0;
  for (const std::size_t tile : {3, 0, 2, 1}) {
    const std::size_t at = tile * kChecksumTileBytes;
    sum += tile_checksum(std::span(bytes).subspan(at, std::min(kChecksumTileBytes, nbytes - at)), tile);
  }
  EXPECT_EQ(sum, checksum(bytes));
  const auto buffer = bench.pool.acquire();
  std::copy(bytes.begin(), bytes.end(), buffer.data().begin());
  bench.extents->write(0, buffer.data(), sum).wait_done();
  bench.extents->read(0, buffer.data(), Verify::kByCaller).wait_done();
  bench.extents->verify(0, checksum(buffer.data().first(nbytes)));
  EXPECT_THROW(bench.extents->verify(0, sum + 1), ChecksumError);
}

TEST_P(Engines, KeepsReadsAndWritesOfOneExtentApart) {
  Bench bench(GetParam(), one_extent(4096));
  const auto a = bench.pool.acquire();
  const auto b = bench.pool.acquire();
  fill(a.data(), 1);
  EXPECT_EQ(bench.extents->state(0), ExtentState::kEmpty);
  EXPECT_THROW(static_cast<void>(bench.extents->read(0, b.data())), InternalError);
  bench.disk.add(
      {.kind = FaultKind::kDelay, .on_read = true, .on_write = true, .delay = std::chrono::milliseconds(50)});
  auto writing = bench.extents->write(0, a.data());
  EXPECT_EQ(bench.extents->state(0), ExtentState::kWriting);
  EXPECT_THROW(static_cast<void>(bench.extents->read(0, b.data())), InternalError);
  writing.wait_done();
  auto reading = bench.extents->read(0, b.data());
  EXPECT_EQ(bench.extents->state(0), ExtentState::kReading);
  EXPECT_THROW(static_cast<void>(bench.extents->write(0, a.data())), InternalError);
  reading.wait_done();
  EXPECT_EQ(bench.extents->state(0), ExtentState::kClean);
}

TEST_P(Engines, FinishesWhatWasPushedBeforeItEnds) {
  Bench bench(GetParam(), one_extent(1 << 20), {.piece_nbytes = 4096, .depth = 4});
  bench.disk.add({.kind = FaultKind::kDelay, .on_write = true, .times = 20, .delay = std::chrono::milliseconds(1)});
  const auto buffer = bench.pool.acquire();
  fill(buffer.data(), 1);
  auto transfer = bench.extents->write(0, buffer.data());
  bench.engine->close();
  EXPECT_TRUE(transfer.is_done());
  transfer.wait_done();
  EXPECT_EQ(bench.engine->stats().written_bytes, std::size_t{1} << 20);
  EXPECT_THROW(static_cast<void>(bench.extents->read(0, buffer.data())), InternalError);
  EXPECT_EQ(bench.extents->state(0), ExtentState::kClean);
}

TEST_P(Engines, RefusesWhatIsNotAlignedOrOutside) {
  Bench bench(GetParam(), one_extent(8192));
  const auto buffer = bench.pool.acquire();
  EXPECT_THROW(static_cast<void>(bench.engine->read(512, buffer.data().first(4096))), InternalError);
  EXPECT_THROW(static_cast<void>(bench.engine->read(0, buffer.data().first(512))), InternalError);
  EXPECT_THROW(static_cast<void>(bench.engine->read(4096, buffer.data().first(8192))), InternalError);
  EXPECT_THROW(static_cast<void>(bench.engine->write(0, buffer.data().subspan(8, 4096))), InternalError);
  EXPECT_THROW(make_io_engine(bench.file, {.piece_nbytes = 1000}), ConfigError);
  EXPECT_THROW(make_io_engine(bench.file, {.depth = 0}), ConfigError);
}

TEST_P(Engines, DoesNothingInAForkedChild) {
  auto bench = std::make_unique<Bench>(GetParam(), one_extent(8192));
  bench->write(0, pattern(8192, 1));
  EXPECT_EQ(in_child([&] {
              bench->extents.reset();
              bench->engine.reset();
              bench->file.close();
              return 0;
            }),
            0);
  EXPECT_EQ(bench->read(0), pattern(8192, 1));
}

TEST_P(Engines, LeavesNothingWhenKilledAtAnyMoment) {
  const TemporaryFolder folder;
  for (int moment = 0; moment < 10; ++moment) {
    const pid_t child = ::fork();
    if (child == 0) {
      HostMemory memory;
      const DiskFile file({.folders = {folder.path()}, .nbytes = 1 << 20, .allow_unnamed = moment % 2 == 0});
      const HostSlab slab(memory, 1 << 20, {.owner = "test"});
      const auto engine = make_io_engine(file, {.kind = GetParam(), .piece_nbytes = 65536});
      while (true) {
        engine->write(0, slab.data())->wait_done();
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(moment * 3));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  for (const auto& name : folder.names()) {
    EXPECT_TRUE(name.ends_with(".scratch")) << name;  // Killed between creation and removal of the name.
    EXPECT_EQ(::unlink((folder.path() + "/" + name).c_str()), 0);
  }
}

TEST(IoEngine, UsesThreadsWhenAskedTo) {
  const TemporaryFolder folder;
  const DiskFile file({.folders = {folder.path()}, .nbytes = 4096});
  EXPECT_STREQ(make_io_engine(file, {.kind = IoEngineKind::kThreads})->name(), "threads");
}

TEST(IoEngine, WorksWithoutRegisteredMemory) {
  const TemporaryFolder folder;
  EXPECT_EQ(in_child([&] {
              struct rlimit none{};
              ::setrlimit(RLIMIT_MEMLOCK, &none);
              HostMemory memory;
              StagingPool pool(memory, {.buffer_count = 2, .buffer_size = 1 << 20});
              const DiskFile file({.folders = {folder.path()}, .nbytes = 1 << 20});
              // Root's memory is not limited.
              if (::getuid() == 0 && ::setuid(65534) != 0) {
                return 1;
              }
              const auto engine = make_io_engine(file, {.buffers = pool.regions()});
              const auto from = pool.acquire();
              const auto to = pool.acquire();
              fill(from.data(), 1);
              engine->write(0, from.data())->wait_done();
              engine->read(0, to.data())->wait_done();
              return std::equal(from.data().begin(), from.data().end(), to.data().begin()) ? 0 : 2;
            }),
            0);
}

}  // namespace
}  // namespace pannier
