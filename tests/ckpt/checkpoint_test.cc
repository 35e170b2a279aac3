#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <random>

#include "pannier/base/error.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/ckpt/safetensors_writer.h"
#include "pannier/io/checksum.h"
#include "tests/ckpt/mutations.h"
#include "tests/io/temporary_folder.h"

namespace pannier::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kNumel = kChunkElements + 5;

Manifest small_manifest() {
  return {.step = 3,
          .world_size = 2,
          .attributes = {{"dtype", "bf16"}},
          .tensors = {{"w", DType::kF32, {2, 3}}, {"none", DType::kF32, {0}}},
          .files = {{"r0.st", 100}, {"r1.st", 90}, {"rng", 8}},
          .shards = {{"r1.st", "w", "w", 4, 6, {2}}, {"r0.st", "w", "w", 0, 4, {1}}},
          .extras = {{1, "rng", 9}}};
}

std::string failure_of(const std::function<void(Manifest&)>& change) {
  Manifest manifest = small_manifest();
  change(manifest);
  try {
    static_cast<void>(parse_manifest(format_manifest(manifest), "manifest.json"));
  } catch (const IoError& error) {
    return error.what();
  }
  return "accepted";
}

// A checkpoint whose one tensor spans two chunks and two files.
void save(const std::string& root, const std::string& tag, std::int64_t step) {
  ASSERT_EQ(::mkdir((root + "/" + tag).c_str(), 0755), 0);
  const SealedFolder folder = SealedFolder(root).folder(tag);
  std::vector<std::byte> bytes(kNumel);
  std::mt19937_64 random(static_cast<std::uint64_t>(step));
  for (auto& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  Manifest manifest{.step = step, .tensors = {{"w", DType::kU8, {kNumel}}}};
  const std::int64_t cut = 1000;
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, std::pair{cut, kNumel}}) {
    const std::string name = "part-" + std::to_string(begin);
    const auto part = std::span(bytes).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    SafetensorsWriter writer(folder, name, {{"w", DType::kU8, {end - begin}}});
    writer.write(0, 0, part);
    writer.finish();
    manifest.files.push_back({name, writer.file_nbytes()});
    manifest.shards.push_back({name, "w", "w", begin, end, chunk_checksums(part, begin, 1)});
  }
  folder.write_text("rng", "12345678");
  manifest.files.push_back({"rng", 8});
  manifest.extras.push_back({0, "rng", checksum(std::as_bytes(std::span("12345678", 8)))});
  write_manifest(folder, manifest);
}

TEST(Manifest, RoundTrips) { EXPECT_EQ(parse_manifest(format_manifest(small_manifest()), "m"), small_manifest()); }

TEST(Manifest, CoversEveryElementOnce) {
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].begin = 5; }), HasSubstr("starts at element 5, 4 was expected"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].begin = 3; }), HasSubstr("starts at element 3, 4 was expected"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].end = 7; }), HasSubstr("end at element 7, 6 was expected"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].end = 4; }), HasSubstr("no range"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].tensor = "v"; }), HasSubstr("'w': its shards end at element 4"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.tensors.push_back({"w"}); }), HasSubstr("'w' is there twice"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].checksums = {}; }), HasSubstr("0 checksums"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.extras[0].rank = 2; }), HasSubstr("rank 2 of 2"));
}

TEST(Manifest, NamesNothingOutsideItsFolder) {
  for (const char* name : {"../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a b", "manifest.json"}) {
    EXPECT_THAT(failure_of([&](Manifest& m) { m.files[0].name = m.shards[1].file = name; }), HasSubstr("is no name"));
  }
  EXPECT_THAT(failure_of([](Manifest& m) { m.files[0].name = "r1.st"; }), HasSubstr("listed twice"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.shards[0].file = "other"; }), HasSubstr("not listed"));
  EXPECT_THAT(failure_of([](Manifest& m) { m.files.push_back({"more", 1}); }), HasSubstr("nothing is in it"));
}

TEST(Manifest, RefusesNewerFormats) {
  try {
    static_cast<void>(parse_manifest(R"({"format_version":2})", "m"));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("format version 2; this version of Pannier reads 1 to 1"));
  }
}

TEST(Manifest, FindsEveryRandomChange) {
  std::mt19937_64 random(11);
  const std::string good = format_manifest(small_manifest());
  for (int i = 0; i < 20000; ++i) {
    try {
      ASSERT_EQ(parse_manifest(mutate(good, random), "m"), small_manifest());
    } catch (const IoError&) {
      continue;
    }
  }
}

TEST(CheckpointFolder, FindsTheNewestComplete) {
  const TemporaryFolder temporary;
  const CheckpointFolder folder(temporary.path());
  EXPECT_EQ(folder.newest_complete(), std::nullopt);
  EXPECT_EQ(folder.latest(), std::nullopt);
  save(temporary.path(), "step2", 2);
  save(temporary.path(), "step10", 10);
  ASSERT_EQ(::mkdir((temporary.path() + "/step11").c_str(), 0755), 0);
  folder.set_latest("step10");
  EXPECT_EQ(folder.latest(), "step10");
  EXPECT_EQ(folder.newest_complete(), "step10");
  EXPECT_THROW(folder.set_latest("step11"), IoError);
  EXPECT_THROW(folder.set_latest("../x"), ConfigError);
  std::filesystem::resize_file(temporary.path() + "/step10/part-0", 100);
  EXPECT_EQ(folder.newest_complete(), "step2");
  EXPECT_THAT(folder.tags(), SizeIs(3));
}

TEST(CheckpointFolder, VerifyNamesTheFlippedChunk) {
  const TemporaryFolder temporary;
  save(temporary.path(), "a", 1);
  const CheckpointFolder folder(temporary.path());
  EXPECT_THAT(folder.verify("a"), IsEmpty());
  const SealedFolder tag = SealedFolder(temporary.path()).folder("a");
  std::string text = tag.read_text("part-1000", 1U << 30);
  text.back() = static_cast<char>(text.back() ^ 1);
  tag.write_text("part-1000", text);
  tag.write_text("rng", "12345679");
  EXPECT_THAT(folder.verify("a"), ElementsAre(HasSubstr("elements 1048576 to 1048581"), HasSubstr("rng")));
  tag.remove("part-0");
  EXPECT_THAT(folder.verify("a"),
              ElementsAre(HasSubstr("part-0"), HasSubstr("part-0"), HasSubstr("part-1000"), HasSubstr("rng")));
}

TEST(CheckpointFolder, FollowsNoLink) {
  const TemporaryFolder temporary;
  save(temporary.path(), "a", 1);
  ASSERT_EQ(::symlink("a", (temporary.path() + "/b").c_str()), 0);
  const CheckpointFolder folder(temporary.path());
  EXPECT_THAT(folder.tags(), SizeIs(1));
  EXPECT_THAT(folder.verify("b"), SizeIs(1));
  std::filesystem::rename(temporary.path() + "/a/part-0", temporary.path() + "/outside");
  ASSERT_EQ(::symlink("../outside", (temporary.path() + "/a/part-0").c_str()), 0);
  EXPECT_EQ(folder.newest_complete(), std::nullopt);
}

TEST(CheckpointFolder, PrunesTheOldestButLatest) {
  const TemporaryFolder temporary;
  for (int i = 1; i <= 4; ++i) {
    save(temporary.path(), "s" + std::to_string(i), i);
  }
  const CheckpointFolder folder(temporary.path());
  folder.set_latest("s1");
  EXPECT_THROW(folder.prune(0), ConfigError);
  EXPECT_THAT(folder.prune(1), ElementsAre("s3", "s2"));
  EXPECT_THAT(temporary.names(), ::testing::UnorderedElementsAre("latest", "s1", "s4"));
  SealedFolder(temporary.path()).folder("s4").write_text("pannier-old-part", "x");
  EXPECT_THAT(folder.remove_leftovers("s4"), ElementsAre("pannier-old-part"));
  EXPECT_THAT(folder.verify("s4"), IsEmpty());
}

}  // namespace
}  // namespace pannier::ckpt
