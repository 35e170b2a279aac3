#include "pannier/hardware/copy_bandwidth.h"

#include <gmock/gmock.h>

#include <limits>

#include "pannier/base/error.h"
#include "pannier/base/thread_team.h"

namespace pannier {
namespace {

using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::Throws;

TEST(CopyBandwidth, IsPlausible) {
  ThreadTeam team(2);
  const auto rate = probe_copy_bandwidth(team.parallel_for(), std::size_t{32} << 20);
  EXPECT_GT(rate, 1e7);
  EXPECT_LT(rate, 1e14);
}

TEST(CopyBandwidth, TakesTinySizes) { EXPECT_GT(probe_copy_bandwidth(serial_for, 1), 0.0); }

TEST(CopyBandwidth, RefusesNothing) { EXPECT_THROW((void)probe_copy_bandwidth(serial_for, 0), ConfigError); }

TEST(CopyBandwidth, RefusesMoreThanThereIs) {
  for (const auto nbytes : {std::size_t{1} << 60, std::numeric_limits<std::size_t>::max()}) {
    EXPECT_THAT([&] { (void)probe_copy_bandwidth(serial_for, nbytes); },
                Throws<OutOfMemoryError>(Property(&OutOfMemoryError::what, HasSubstr("bandwidth probe"))));
  }
}

TEST(CopyBandwidth, PassesErrorsOn) {
  const ParallelFor broken = [](std::int64_t, std::int64_t, const auto&) { throw IoError("thread", 11); };
  EXPECT_THROW((void)probe_copy_bandwidth(broken, 4096), IoError);
}

}  // namespace
}  // namespace pannier
