#include "pannier/hardware/core_use.h"

#include <gtest/gtest.h>

#include "tests/hardware/fake_root.h"

namespace pannier {
namespace {

TEST(CoreUse, CountsWhatOthersTakeOfTheCoresOfThisProcess) {
  const FakeRoot root;
  root.write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0,2\n");
  root.write("proc/stat",
             "cpu  9 9 9 9 9 9 9\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 10 0 0 0 0 0 0 0\nintr 5\n");
  const CoreUse use(root.path());
  EXPECT_EQ(use.num_cores(), 2);
  EXPECT_DOUBLE_EQ(use.cores_left(), 2.0) << "no tick went by";
  // Of core 0 half is busy, in every way of being so; core 1 is not ours; core 2 waits for a disk or is stolen.
  root.write("proc/stat",
             "cpu0 1000 1000 1000 5000 0 1000 1000 0\ncpu1 9000 0 0 0 0 0 0 0\ncpu2 10 0 0 5000 5000 0 0 7000\n");
  EXPECT_NEAR(use.cores_left(), 1.5, 0.01);
}

TEST(CoreUse, LeavesAllWhereNothingIsKnown) {
  const FakeRoot root;
  const CoreUse nothing(root.path());
  EXPECT_EQ(nothing.num_cores(), 0);
  EXPECT_DOUBLE_EQ(nothing.cores_left(), 0.0);
  root.write("proc/self/status", "Cpus_allowed_list:\t0\n");
  root.write("proc/stat", "cpu0 1 2\ncpux 1 2 3 4 5 6 7 8\ncpu0 a b c d e f g h\n");
  const CoreUse odd(root.path());
  EXPECT_DOUBLE_EQ(odd.cores_left(), static_cast<double>(odd.num_cores()));
}

}  // namespace
}  // namespace pannier
