#include "pannier/hardware/copy_bandwidth.h"

#include <gmock/gmock.h>

#include <array>
#include <limits>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/copy_kernels.h"

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

TEST(CopyKernels, CopyEveryByteAndNoOther) {
  constexpr std::size_t kNbytes = 3 * 4096 + 5 * kCopyAlignment;
  struct alignas(kCopyAlignment) Block {
    std::array<std::byte, kCopyAlignment> bytes;
  };
  std::vector<Block> from(kNbytes / kCopyAlignment + 2);
  auto* source = reinterpret_cast<std::byte*>(from.data());
  for (std::size_t i = 0; i < from.size() * kCopyAlignment; ++i) {
    source[i] = static_cast<std::byte>(i * 37 % 251 + 1);
  }
  for (const CopyKernel& kernel : available_copy_kernels()) {
    std::vector<Block> to(from.size());
    auto* target = reinterpret_cast<std::byte*>(to.data());
    kernel.copy(target + kCopyAlignment, source + kCopyAlignment, kNbytes);
    for (std::size_t i = 0; i < to.size() * kCopyAlignment; ++i) {
      const bool copied = i >= kCopyAlignment && i < kCopyAlignment + kNbytes;
      ASSERT_EQ(target[i], copied ? source[i] : std::byte{0}) << kernel.name << " at " << i;
    }
  }
}

TEST(CopyBandwidth, TakesTinySizes) {
  for (const std::size_t nbytes : {1, 63, 64, 65}) {
    EXPECT_GT(probe_copy_bandwidth(serial_for, nbytes), 0.0) << nbytes;
  }
}

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
