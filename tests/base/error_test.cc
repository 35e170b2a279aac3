#include "pannier/base/error.h"

#include <gmock/gmock.h>

#include <cerrno>

namespace pannier {
namespace {

TEST(Check, ThrowsWithMessageAndExpression) {
  try {
    PANNIER_CHECK(1 == 2, "one is not two");
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("one is not two (1 == 2 failed at "));
  }
}

TEST(IoError, CarriesNumberAndText) {
  const IoError error("write /x at offset 4096", ENOSPC);
  EXPECT_STREQ(error.what(), "write /x at offset 4096: No space left on device");
  EXPECT_EQ(error.error_number(), ENOSPC);
}

TEST(OutOfMemoryError, SaysOwnerWantedAndFree) {
  const OutOfMemoryError error("CPU", "optimizer states", 2048, 1024);
  EXPECT_STREQ(error.what(), "CPU out of memory. Tried to allocate 2.00 KiB for optimizer states, 1.00 KiB free.");
}

}  // namespace
}  // namespace pannier
