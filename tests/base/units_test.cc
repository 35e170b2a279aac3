#include "pannier/base/units.h"

#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

TEST(ParseBytes, ReadsDecimalAndBinarySuffixes) {
  EXPECT_EQ(parse_bytes("24GiB"), std::size_t{24} << 30);
  EXPECT_EQ(parse_bytes("1.5 KiB"), 1536U);
  EXPECT_EQ(parse_bytes("512MB"), 512000000U);
  EXPECT_EQ(parse_bytes("1048576"), 1048576U);
  EXPECT_EQ(parse_bytes("0"), 0U);
}

TEST(ParseBytes, RefusesWhatIsNoSize) {
  for (const char* text : {"", "GiB", "-1GiB", "1 parsec", "nan", "1e300GiB", "0x"}) {
    EXPECT_THROW((void)parse_bytes(text), ConfigError) << text;
  }
}

TEST(FormatBytes, PicksTheUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(812), "812 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(std::size_t{5} << 30), "5.00 GiB");
}

}  // namespace
}  // namespace pannier
