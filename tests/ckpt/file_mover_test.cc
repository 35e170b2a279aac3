#include "pannier/ckpt/file_mover.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <numeric>
#include <random>

#include "pannier/base/error.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/verified_reads.h"
#include "tests/io/temporary_folder.h"

namespace pannier::ckpt {
namespace {

using ::testing::HasSubstr;

constexpr FileMoverOptions kSmall{.buffer_nbytes = 16384, .num_buffers = 4, .num_threads = 3};

std::vector<std::byte> random_bytes(std::size_t nbytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(nbytes);
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

TEST(ChecksumStream, IsTheChecksumOfAllWhateverTheRuns) {
  const auto bytes = random_bytes(700'001, 3);
  std::mt19937_64 random(5);
  ChecksumStream stream;
  for (int i = 0; i < 20; ++i) {
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t run = std::min<std::size_t>(bytes.size() - at, random() % 300'000);
      stream.update(std::span(bytes).subspan(at, run));
      at += run;
    }
    ASSERT_EQ(stream.take(), checksum(bytes));
  }
  EXPECT_EQ(stream.take(), checksum({}));
}

TEST(FileMoverOptions, StayBelowATwentiethOfTheFiles) {
  EXPECT_EQ(FileMoverOptions::for_files_of(std::uint64_t{1} << 40).nbytes(), std::size_t{64} << 20);
  for (std::uint64_t nbytes = 16 << 20; nbytes < std::uint64_t{1} << 36; nbytes *= 3) {
    const auto options = FileMoverOptions::for_files_of(nbytes);
    EXPECT_LE(options.nbytes(), nbytes / 20);
    EXPECT_EQ(options.buffer_nbytes % 4096, 0U);
  }
}

TEST(PackedFile, HasTheBytesThatCame) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  HostMemory memory;
  FileMover mover(memory, kSmall);
  std::mt19937_64 random(1);
  for (const std::size_t nbytes : {0U, 1U, 4096U, 16384U, 16385U, 200'003U}) {
    const auto bytes = random_bytes(nbytes, nbytes);
    PackedFile file(mover, folder.create_file("f"), "f", nbytes);
    PackedFile other(mover, folder.create_file("g"), "g", nbytes);
    for (std::size_t at = 0; at < nbytes;) {
      const std::size_t run = std::min<std::size_t>(nbytes - at, 1 + random() % 40'000);
      file.append(std::span(bytes).subspan(at, run));
      other.append(std::span(bytes).subspan(at, run));
      at += run;
    }
    file.finish();
    other.finish();
    for (const char* name : {"f", "g"}) {
      const std::string text = folder.read_text(name, 1 << 20);
      ASSERT_EQ(text.size(), nbytes);
      EXPECT_TRUE(std::equal(text.begin(), text.end(), reinterpret_cast<const char*>(bytes.data())));
    }
  }
}

TEST(PackedFile, SaysWhichFileHasNoRoom) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  HostMemory memory;
  FileMover mover(memory, kSmall);
  try {
    PackedFile file(mover, folder.create_file("f"), "the file", std::uint64_t{1} << 60);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("write 'the file': 1152921504606846976 bytes wanted"));
  }
}

// A checkpoint whose tensor spans several chunks and two files, at odd places.
class Verified : public ::testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 2 * kChunkElements + 12'345;
  static constexpr std::int64_t kCut = kChunkElements / 2 + 77;

  Verified() : bytes_(random_bytes(2 * kNumel, 9)) {
    static_cast<void>(::mkdir((temporary_.path() + "/t").c_str(), 0755));
    const SealedFolder folder(temporary_.path() + "/t");
    Manifest manifest{.tensors = {{"w", DType::kF16, {kNumel}}, {"v", DType::kF16, {5}}}};
    FileMover mover(memory_, kSmall);
    int rank = 0;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, kCut}, std::pair{kCut, kNumel}}) {
      std::vector<ShareEntry> entries{{"w", DType::kF16, begin, end}};
      if (rank == 0) {
        entries.insert(entries.begin(), {"v", DType::kF16, 0, 5});
      }
      ShareWriter writer(folder, share_file_name("s", rank, "rank"), entries, &mover);
      if (rank++ == 0) {
        writer.write(std::span(bytes_).first(10));
      }
      writer.write(range(begin, begin + 3));
      writer.write(range(begin + 3, end));
      Share share = writer.finish();
      manifest.files.insert(manifest.files.end(), share.files.begin(), share.files.end());
      manifest.shards.insert(manifest.shards.end(), share.shards.begin(), share.shards.end());
    }
    write_manifest(folder, manifest);
  }

  [[nodiscard]] std::span<const std::byte> range(std::int64_t begin, std::int64_t end) const {
    return std::span(bytes_).subspan(static_cast<std::size_t>(2 * begin), static_cast<std::size_t>(2 * (end - begin)));
  }
  void expect_runs(const std::vector<TensorRun>& runs) {
    CheckpointReader reader{SealedFolder(temporary_.path() + "/t")};
    FileMover mover(memory_, kSmall);
    VerifiedReads reads(reader, mover, runs);
    std::mt19937_64 random(2);
    for (const auto& run : runs) {
      std::vector<std::byte> found(static_cast<std::size_t>(2 * (run.end - run.begin)));
      for (std::size_t at = 0; at < found.size();) {
        const std::size_t part = std::min<std::size_t>(found.size() - at, 2 + random() % 300'000);
        reads.read(std::span(found).subspan(at, part));
        at += part;
      }
      const auto expected = run.tensor == "w" ? range(run.begin, run.end) : range(0, 5);
      ASSERT_TRUE(std::equal(found.begin(), found.end(), expected.begin(), expected.end())) << run.begin;
    }
  }

  TemporaryFolder temporary_;
  HostMemory memory_;
  std::vector<std::byte> bytes_;
};

TEST_F(Verified, GivesTheBytesOfAnyRuns) {
  expect_runs({{"v", 0, 5}, {"w", 0, kNumel}});
  expect_runs({{"w", 7, kCut - 1}, {"v", 0, 5}, {"w", kCut - 1, kCut + 1}, {"w", kCut + 1, kNumel}});
  expect_runs({{"w", kCut + 3, kCut + 4}});
  expect_runs({{"w", 5, 5}, {"w", 9, 11}, {"w", kChunkElements, kChunkElements + 1}, {"w", kNumel - 1, kNumel}});
  expect_runs({});
  EXPECT_THROW(expect_runs({{"w", 0, kNumel + 1}}), ConfigError);
  EXPECT_THROW(expect_runs({{"x", 0, 1}}), ConfigError);
}

TEST_F(Verified, FindsABitThatWasFlippedInAChunkOfARun) {
  const std::string path = temporary_.path() + "/t/" + share_file_name("s", 1, "rank");
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  ASSERT_NE(file, nullptr);
  std::fseek(file, -1, SEEK_END);
  const int last = std::fgetc(file);
  std::fseek(file, -1, SEEK_END);
  std::fputc(last ^ 4, file);
  std::fclose(file);
  expect_runs({{"w", 0, 2 * kChunkElements}});
  try {
    expect_runs({{"w", 2 * kChunkElements + 8, 2 * kChunkElements + 9}});
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("tensor 'w', elements 2097152 to 2109497: checksum"));
  }
}

}  // namespace
}  // namespace pannier::ckpt
