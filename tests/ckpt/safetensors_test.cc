#include <gmock/gmock.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <random>

#include "pannier/base/error.h"
#include "pannier/ckpt/safetensors_reader.h"
#include "pannier/ckpt/safetensors_writer.h"
#include "tests/ckpt/mutations.h"
#include "tests/io/temporary_folder.h"

namespace pannier::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kGood =
    R"({"__metadata__":{"format":"pt"},"b":{"data_offsets":[8,12],"dtype":"BF16","shape":[2]},)"
    R"("a":{"data_offsets":[0,8],"dtype":"F32","shape":[2,1]},"z":{"data_offsets":[12,12],"dtype":"I8","shape":[0]}})";

std::string failure_of(std::string_view json, std::uint64_t nbytes) {
  try {
    static_cast<void>(parse_safetensors_header(json, nbytes, "file.st"));
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("file.st"));
    return error.what();
  }
  return "accepted";
}

std::string contents(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(SafetensorsHeader, OrdersByOffset) {
  const auto header = parse_safetensors_header(kGood, 12, "file.st");
  ASSERT_EQ(header.entries.size(), 3U);
  EXPECT_EQ(header.entries[0].info, (TensorInfo{"a", DType::kF32, {2, 1}}));
  EXPECT_EQ(header.entries[1].info.name, "b");
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, SaysWhatIsWrong) {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_EQ(failure_of(one("F32", "[2]", "[0,8]"), 8), "accepted");
  EXPECT_THAT(failure_of(one("F33", "[2]", "[0,8]"), 8), HasSubstr("tensor 'w': unknown dtype 'F33'"));
  EXPECT_THAT(failure_of(one("F32", "[3]", "[0,8]"), 8), HasSubstr("needs 12 bytes, its data_offsets hold 8"));
  EXPECT_THAT(failure_of(one("F32", "[-2]", "[0,8]"), 8), HasSubstr("got -2"));
  EXPECT_THAT(failure_of(one("F32", "[2.0]", "[0,8]"), 8), HasSubstr("got 2.0"));
  EXPECT_THAT(failure_of(one("F32", "[4294967296,4294967296]", "[0,8]"), 8), HasSubstr("more bytes than can be"));
  EXPECT_THAT(failure_of(one("F32", "[2]", "[8,0]"), 8), HasSubstr("not within"));
  EXPECT_THAT(failure_of(one("F32", "[2]", "[0,8]"), 4), HasSubstr("not within the 4 bytes"));
  EXPECT_THAT(failure_of(one("F32", "[2]", "[4,12]"), 12), HasSubstr("there is a hole"));
  EXPECT_THAT(failure_of(one("F32", "[2]", "[0,8]"), 9), HasSubstr("end at byte 8 of the data, the file at 9"));
  EXPECT_THAT(failure_of(R"({"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                         R"("v":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                         3),
              HasSubstr("overlaps"));
  EXPECT_THAT(failure_of(R"({"w":{},"w":{}})", 0), HasSubstr("there twice"));
  EXPECT_THAT(failure_of("[]", 0), HasSubstr("does not start"));
  EXPECT_THAT(failure_of(R"({"w":)" + std::string(100000, '['), 0), HasSubstr("deeper"));
  EXPECT_THAT(failure_of(R"({"__metadata__":{"a":1}})", 0), HasSubstr("a string was expected"));
}

TEST(SafetensorsHeader, SurvivesRandomChanges) {
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    try {
      const auto header = parse_safetensors_header(mutate(std::string(kGood), random), 12, "file.st");
      std::uint64_t at = 0;
      for (const auto& entry : header.entries) {
        ASSERT_EQ(entry.begin, at);
        at = entry.end;
      }
      ASSERT_EQ(at, 12U);
      ++accepted;
    } catch (const IoError&) {
      continue;
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(SafetensorsWriter, WritesTheFormatsBytes) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  SafetensorsWriter writer(folder, "w.safetensors", {{"x", DType::kU8, {3}}}, {.metadata = {{"format", "pt"}}});
  writer.write(0, 0, std::as_bytes(std::span("ab", 2)));
  writer.write(0, 2, std::as_bytes(std::span("c", 1)));
  writer.finish();
  const std::string json = R"({"__metadata__":{"format":"pt"},"x":{"data_offsets":[0,3],"dtype":"U8","shape":[3]}})";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  std::string head(8, '\0');
  head[0] = static_cast<char>(padded.size());
  EXPECT_EQ(contents(temporary.path() + "/w.safetensors"), head + padded + "abc");
  EXPECT_EQ(writer.file_nbytes(), 8 + padded.size() + 3);
}

TEST(SafetensorsWriter, RoundTripsByRanges) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const auto bytes = std::as_bytes(std::span(values));
  {
    SafetensorsWriter writer(folder, "w",
                             {{"a", DType::kF32, {4}}, {"none", DType::kI64, {0, 3}}, {"b", DType::kF32, {}}},
                             {.data_alignment = 4096});
    writer.write(0, 0, bytes.first(12));
    EXPECT_THROW(writer.write(0, 2, bytes.first(4)), ConfigError);
    EXPECT_THROW(writer.write(2, 0, bytes.first(4)), ConfigError);
    EXPECT_THROW(writer.finish(), ConfigError);
    writer.write(0, 3, bytes.subspan(12, 4));
    writer.write(2, 0, bytes.subspan(16, 4));
    EXPECT_THAT(temporary.names(), ElementsAre("w.partial"));
    writer.finish();
    EXPECT_EQ(writer.file_nbytes(), 4096U + 20);
  }
  EXPECT_THAT(temporary.names(), ElementsAre("w"));
  const SafetensorsReader reader(folder, "w");
  std::vector<float> read(2);
  reader.read("a", 2, std::as_writable_bytes(std::span(read)));
  EXPECT_THAT(read, ElementsAre(3, 4));
  EXPECT_THROW(reader.read("a", 3, std::as_writable_bytes(std::span(read))), ConfigError);
  EXPECT_EQ(reader.find("c"), nullptr);
  EXPECT_EQ(reader.find("none")->numel, 0);
}

// A file as safetensors.numpy.save_file lays it out: s = 2.0 (fp32, no dimensions) and h = [[5, 6], [7, 8]] (int16).
TEST(SafetensorsReader, ReadsWhatThePythonPackageWrote) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  std::string json = R"({"__metadata__":{"x":"y"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                     R"("h":{"dtype":"I16","shape":[2,2],"data_offsets":[4,12]}})";
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string file(8, '\0');
  file[0] = static_cast<char>(json.size());
  file += json + std::string("\0\0\0\x40\5\0\6\0\7\0\x8\0", 12);
  folder.write_text("theirs", file);
  const SafetensorsReader reader(folder, "theirs");
  std::vector<std::int16_t> h(2);
  reader.read("h", 1, std::as_writable_bytes(std::span(h)));
  EXPECT_THAT(h, ElementsAre(6, 7));
  float s = 0;
  reader.read("s", 0, std::as_writable_bytes(std::span(&s, 1)));
  EXPECT_EQ(s, 2.0F);
  EXPECT_EQ(reader.metadata().at("x"), "y");
}

TEST(SafetensorsWriter, LeavesNothingUnlessFinished) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  {
    const SafetensorsWriter writer(folder, "w", {{"a", DType::kF32, {4}}});
  }
  EXPECT_TRUE(temporary.names().empty());
  EXPECT_THROW(SafetensorsWriter(folder, "../w", {}), ConfigError);
  EXPECT_THROW(SafetensorsWriter(folder, "w", {{"a"}, {"a"}}), ConfigError);
}

TEST(SafetensorsReader, RefusesTornFiles) {
  const TemporaryFolder temporary;
  const SealedFolder folder(temporary.path());
  SafetensorsWriter writer(folder, "w", {{"a", DType::kF32, {1}}});
  writer.write(0, 0, std::vector<std::byte>(4));
  writer.finish();
  const std::string whole = contents(temporary.path() + "/w");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    folder.write_text("torn", whole.substr(0, size));
    EXPECT_THROW(SafetensorsReader(folder, "torn"), IoError) << size;
  }
  folder.write_text("torn", std::string(7, '\xff') + std::string(20, '\x7f'));
  EXPECT_THROW(SafetensorsReader(folder, "torn"), IoError);
  ASSERT_EQ(::symlink("w", (temporary.path() + "/link").c_str()), 0);
  EXPECT_THROW(SafetensorsReader(folder, "link"), IoError);
}

}  // namespace
}  // namespace pannier::ckpt
