#include "pannier/hardware/kernel_text.h"

#include <gmock/gmock.h>

#include <limits>

#include "tests/hardware/fake_root.h"

namespace pannier {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(KernelText, SplitsWordsAndParts) {
  EXPECT_THAT(split_words("  a\tbc \n d\n"), ElementsAre("a", "bc", "d"));
  EXPECT_THAT(split_words(" \n"), IsEmpty());
  EXPECT_THAT(split_at("a,,b,", ','), ElementsAre("a", "", "b"));
  EXPECT_THAT(split_at("", ','), IsEmpty());
}

TEST(KernelText, ReadsCountsAndRefusesTheRest) {
  EXPECT_EQ(parse_count(" 42\n"), 42U);
  EXPECT_EQ(parse_count("99999999999999999999999"), std::numeric_limits<std::size_t>::max());
  for (const char* text : {"", "max", "-1", "12x", "1.5"}) {
    EXPECT_EQ(parse_count(text), std::nullopt) << text;
  }
}

TEST(KernelText, FindsFieldsWithTheirUnit) {
  EXPECT_EQ(find_field("MemTotal:  12 kB\nMemFree: 3 kB\n", "MemFree:"), 3U * 1024);
  EXPECT_EQ(find_field("Node 0 MemTotal:  12 kB\n", "MemTotal:"), 12U * 1024);
  EXPECT_EQ(find_field("total_inactive_file 4096\ninactive_file 1\n", "inactive_file"), 1U);
  EXPECT_EQ(find_field("MemTotal: 99999999999999999999 kB", "MemTotal:"), std::numeric_limits<std::size_t>::max());
  EXPECT_EQ(find_field("MemTotal:\nMemFree: x kB", "MemTotal:"), std::nullopt);
  EXPECT_EQ(find_field("MemTotal:\nMemFree: x kB", "MemFree:"), std::nullopt);
}

TEST(KernelText, ReadsIdLists) {
  EXPECT_THAT(parse_id_list("0-3,8\n"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(parse_id_list("5"), ElementsAre(5));
  EXPECT_THAT(parse_id_list("x,2,3-1,0-99999999999999999999,-"), ElementsAre(2));
  EXPECT_THAT(parse_id_list("\n"), IsEmpty());
}

TEST(KernelText, MissingFilesAndFoldersAreNothing) {
  const FakeRoot root;
  root.write("folder/file", "text");
  EXPECT_EQ(read_kernel_text(root.path() / "folder/file"), "text");
  EXPECT_EQ(read_kernel_text(root.path() / "folder"), std::nullopt);
  EXPECT_EQ(read_kernel_text(root.path() / "missing"), std::nullopt);
}

}  // namespace
}  // namespace pannier
