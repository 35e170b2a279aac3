#include "pannier/device/memory_meter.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

TEST(MemoryMeter, CountsTensorsByOwnerAndPeak) {
  MemoryMeter& meter = MemoryMeter::install();
  const std::size_t before = meter.ledger().memory().current;
  meter.ledger().reset_peak();
  {
    const OwnerScope scope(Owner::kGradients);
    const at::Tensor tensor = at::empty({1000}, at::kFloat);
    EXPECT_EQ(meter.ledger().memory().current, before + 4000);
    EXPECT_EQ(meter.ledger().memory().current_by_owner[1], 4000U);
    EXPECT_TRUE(meter.counts(tensor.storage().data_ptr()));
  }
  EXPECT_EQ(meter.ledger().memory().current, before);
  EXPECT_EQ(meter.ledger().memory().current_by_owner[1], 0U);
  EXPECT_EQ(meter.ledger().memory().peak_by_owner[1], 4000U);
}

TEST(MemoryMeter, InstallsOnce) { EXPECT_EQ(&MemoryMeter::install(), &MemoryMeter::install()); }

TEST(MemoryMeter, RefusesAboveTheCapAndCountsNothing) {
  MemoryMeter& meter = MemoryMeter::install();
  const std::size_t before = meter.ledger().memory().current;
  meter.ledger().add_cap(before + 5000);
  meter.ledger().add_cap(before + 1000);
  try {
    const at::Tensor tensor = at::empty({1000}, at::kFloat);
    FAIL() << "an allocation above the cap passed";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_THAT(error.msg(), testing::HasSubstr("CPU out of memory. Tried to allocate 3.91 KiB for activations"));
  }
  EXPECT_EQ(meter.ledger().memory().current, before);
  const at::Tensor fits = at::empty({250}, at::kFloat);
  EXPECT_THROW(meter.ledger().add_cap(1), ConfigError);
  meter.ledger().remove_cap(before + 1000);
  EXPECT_EQ(meter.ledger().memory().cap, before + 5000);
  meter.ledger().remove_cap(before + 5000);
  EXPECT_EQ(meter.ledger().memory().cap, 0U);
}

TEST(MemoryMeter, KeepsTheAlignmentOfTorch) {
  (void)MemoryMeter::install();
  for (const std::int64_t numel : {1, 3, 17, 1001}) {
    const at::Tensor tensor = at::ones({numel}, at::kFloat);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0U);
  }
}

TEST(MemoryMeter, ServesRawAllocations) {
  MemoryMeter& meter = MemoryMeter::install();
  const std::size_t before = meter.ledger().memory().current;
  void* raw = meter.raw_allocate(128);
  EXPECT_EQ(meter.ledger().memory().current, before + 128);
  meter.raw_deallocate(raw);
  EXPECT_EQ(meter.ledger().memory().current, before);
}

TEST(MemoryMeter, RecordsATimeline) {
  MemoryMeter& meter = MemoryMeter::install();
  meter.ledger().start_timeline(1000);
  {
    const at::Tensor large = at::empty({1 << 20}, at::kFloat);
  }
  {
    const at::Tensor small = at::empty({10}, at::kFloat);
  }
  const auto samples = meter.ledger().take_timeline();
  ASSERT_EQ(samples.size(), 3U);
  EXPECT_EQ(samples[1].by_owner[3], samples[0].by_owner[3] + (std::size_t{4} << 20));
  EXPECT_LE(samples[1].seconds, samples[2].seconds);
  EXPECT_TRUE(meter.ledger().take_timeline().empty());
}

TEST(MemoryMeter, RecordsMemoryThatOnlyChangesHands) {
  MemoryMeter& meter = MemoryMeter::install();
  const at::Tensor tensor = at::empty({1 << 20}, at::kFloat);
  meter.ledger().start_timeline(1000);
  meter.reassign(tensor.storage().data_ptr(), Owner::kGradients);
  const auto samples = meter.ledger().take_timeline();
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[1].by_owner[1], samples[0].by_owner[1] + (std::size_t{4} << 20));
}

}  // namespace
}  // namespace pannier
