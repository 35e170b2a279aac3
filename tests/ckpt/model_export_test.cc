#include "pannier/ckpt/model_export.h"

#include <gmock/gmock.h>

#include <bit>
#include <cstring>
#include <numeric>

#include "pannier/base/error.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "tests/io/temporary_folder.h"

namespace pannier::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::vector<float> counting(std::int64_t numel) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

// A checkpoint with a matrix stored by columns, a big vector, a buffer and an empty tensor.
CheckpointReader make_checkpoint(const std::string& path) {
  CheckpointBuilder builder(path, "t",
                            {{"model.matrix", DType::kF32, {3, 2}},
                             {"optimizer.exp_avg.matrix", DType::kF32, {3, 2}},
                             {"model.long", DType::kF32, {kChunkElements + 3}},
                             {"model.none", DType::kF32, {0, 4}},
                             {"model.count", DType::kF32, {2}}});
  for (const std::int64_t numel :
       {std::int64_t{6}, std::int64_t{6}, kChunkElements + 3, std::int64_t{0}, std::int64_t{2}}) {
    const auto values = counting(numel);
    builder.write(std::as_bytes(std::span(values)));
  }
  builder.commit(5, {{"order.matrix", "1,0"}, {"kind.count", "buffer"}});
  return CheckpointReader(SealedFolder(path).folder("t"));
}

std::vector<float> values_in(const SafetensorsReader& reader, const std::string& name) {
  const auto* entry = reader.find(name);
  std::vector<std::byte> bytes(entry->end - entry->begin);
  reader.read(name, 0, bytes);
  std::vector<float> values;
  widen_values(bytes, entry->info.dtype, values);
  return values;
}

TEST(ModelExport, WritesOneFileWithRowsAndWithoutStates) {
  const TemporaryFolder folder;
  auto checkpoint = make_checkpoint(folder.path() + "/in");
  EXPECT_THAT(consolidate(checkpoint, folder.path() + "/out", DType::kBF16), ElementsAre("model.safetensors"));
  const SafetensorsReader model(folder.path() + "/out/model.safetensors");
  EXPECT_THAT(model.entries(), SizeIs(4));
  EXPECT_THAT(model.find("matrix")->info.shape, ElementsAre(2, 3));
  EXPECT_EQ(model.find("matrix")->info.dtype, DType::kBF16);
  EXPECT_THAT(values_in(model, "matrix"), ElementsAre(1, 3, 5, 2, 4, 6));
  EXPECT_EQ(model.find("count")->info.dtype, DType::kF32) << "a buffer keeps its type";
  EXPECT_EQ(model.metadata().at("format"), "pt");
}

TEST(ModelExport, SplitsByTheGreatestSizeAndWritesAnIndex) {
  const TemporaryFolder folder;
  auto checkpoint = make_checkpoint(folder.path() + "/in");
  EXPECT_THAT(consolidate(checkpoint, folder.path() + "/out", DType::kF32, {.max_shard_nbytes = 1000}),
              ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors"));
  const std::string index = SealedFolder(folder.path() + "/out").read_text("model.safetensors.index.json", 10000);
  EXPECT_THAT(index, HasSubstr(R"("long": "model-00002-of-00003.safetensors")"));
  EXPECT_THAT(index, HasSubstr("\"total_size\": 4194348"));
  const SafetensorsReader second(folder.path() + "/out/model-00002-of-00003.safetensors");
  EXPECT_EQ(values_in(second, "long"), counting(kChunkElements + 3));
}

TEST(CheckpointReader, ReadsAnyRangeAndNamesWhatIsWrong) {
  const TemporaryFolder folder;
  auto checkpoint = make_checkpoint(folder.path());
  std::vector<float> values(5);
  checkpoint.read("model.long", kChunkElements - 2, std::as_writable_bytes(std::span(values)));
  EXPECT_EQ(values.front(), static_cast<float>(kChunkElements - 1));
  EXPECT_EQ(values.back(), static_cast<float>(kChunkElements + 3));
  EXPECT_THROW(checkpoint.read("model.long", kChunkElements, std::as_writable_bytes(std::span(values))), ConfigError);
  EXPECT_THROW(checkpoint.read("model.missing", 0, std::as_writable_bytes(std::span(values))), ConfigError);
}

TEST(Share, RoundTripsAsText) {
  const Share share{.files = {{"a", 7}}, .shards = {{"a", "k", "t", 1, 3, {9}}}, .extras = {{1, "e", 4}}};
  EXPECT_EQ(parse_share(format_share(share), "rank 1"), share);
}

TEST(ModelExport, ReadsSizesAsPeopleWriteThem) {
  EXPECT_EQ(parse_size("5GB"), 5'000'000'000U);
  EXPECT_EQ(parse_size("2GiB"), std::uint64_t{2} << 30);
  EXPECT_EQ(parse_size("17"), 17U);
  for (const auto* text : {"", "GB", "0", "5 apples", "-1", "99999999999TB"}) {
    EXPECT_THROW((void)parse_size(text), ConfigError) << text;
  }
}

TEST(ModelExport, WidensEveryHalf) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    std::vector<float> values;
    widen_values(std::as_bytes(std::span(&half, 1)), DType::kF16, values);
    _Float16 expected = 0;
    std::memcpy(&expected, &half, sizeof half);
    const auto wide = static_cast<float>(expected);
    EXPECT_TRUE(values[0] == wide || (wide != wide && values[0] != values[0])) << bits;
  }
}

}  // namespace
}  // namespace pannier::ckpt
