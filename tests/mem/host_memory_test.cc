#include "pannier/mem/host_memory.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::Throws;

HostMemoryOptions machine_with(std::size_t nbytes) {
  return {.headroom_bytes = 0, .bytes_available = [nbytes] { return nbytes; }};
}

TEST(HostMemory, CountsWhatIsSettled) {
  HostMemory memory(machine_with(1000));
  {
    auto claim = memory.claim("moments", 600);
    EXPECT_EQ(claim.nbytes(), 600U);
    EXPECT_EQ(claim.owner(), "moments");
    EXPECT_EQ(memory.current_bytes(), 0U);
    EXPECT_EQ(memory.free_bytes(), 400U);
    claim.settle(200);
    claim.settle(300);
    EXPECT_EQ(memory.current_bytes(), 500U);
    EXPECT_EQ(memory.stats().by_owner.at("moments").current_bytes, 500U);
  }
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.peak_bytes(), 500U);
  EXPECT_EQ(memory.free_bytes(), 1000U);
}

TEST(HostMemory, KeepsPeaksByOwner) {
  HostMemory memory(machine_with(1000));
  auto kept = memory.claim("gradients", 100);
  kept.settle(100);
  {
    auto first = memory.claim("moments", 300);
    first.settle(300);
  }
  auto second = memory.claim("moments", 50);
  second.settle(50);
  const auto stats = memory.stats();
  EXPECT_EQ(stats.total.current_bytes, 150U);
  EXPECT_EQ(stats.total.peak_bytes, 400U);
  EXPECT_EQ(stats.by_owner.at("moments").current_bytes, 50U);
  EXPECT_EQ(stats.by_owner.at("moments").peak_bytes, 300U);
  memory.reset_peak();
  EXPECT_EQ(memory.peak_bytes(), 150U);
  EXPECT_EQ(memory.stats().by_owner.at("moments").peak_bytes, 50U);
}

TEST(HostMemory, RefusesAboveTheBudgetAndNamesTheOwner) {
  auto options = machine_with(std::size_t{1} << 40);
  options.budget_bytes = 4096;
  HostMemory memory(options);
  auto held = memory.claim("gradients", 1024);
  held.settle(1024);
  const auto claimed = memory.claim("moments", 1024);  // Counts though nothing of it is touched.
  EXPECT_THAT([&] { (void)memory.claim("master weights", 3072); },
              Throws<OutOfMemoryError>(Property(
                  &OutOfMemoryError::what,
                  AllOf(HasSubstr("host out of memory"), HasSubstr("3.00 KiB for master weights, 2.00 KiB free")))));
  EXPECT_EQ(memory.stats().by_owner.count("master weights"), 0U);
  (void)memory.claim("master weights", 2048);
  EXPECT_EQ(memory.budget_bytes(), 4096U);
}

TEST(HostMemory, RefusesAboveWhatTheMachineHas) {
  auto options = machine_with(10000);
  options.headroom_bytes = 4000;
  HostMemory memory(options);
  EXPECT_THROW((void)memory.claim("x", 6001), OutOfMemoryError);
  EXPECT_EQ(memory.claim("x", 6000).nbytes(), 6000U);
}

TEST(HostMemory, HeadroomAboveTheMachineLeavesNothing) {
  HostMemory memory({.headroom_bytes = 2000, .bytes_available = [] { return std::size_t{1000}; }});
  EXPECT_EQ(memory.free_bytes(), 0U);
  EXPECT_THROW((void)memory.claim("x", 1), OutOfMemoryError);
  EXPECT_EQ(memory.claim("x", 0).nbytes(), 0U);
}

TEST(HostMemory, AsksTheKernelByDefault) {
  HostMemory memory;
  EXPECT_GT(memory.free_bytes(), 0U);
  EXPECT_THROW((void)memory.claim("everything", std::size_t{1} << 60), OutOfMemoryError);
}

TEST(HostMemory, LooksAgainWhenTheFigureIsStale) {
  HostClaim other;
  int looks = 0;
  // While the second claim looks at the machine, the first settles: the old figure counts its bytes nowhere.
  HostMemory memory({.headroom_bytes = 0, .bytes_available = [&] {
                       ++looks;
                       if (looks == 2) {
                         other.settle(other.nbytes());
                         return std::size_t{1000};
                       }
                       return std::size_t{looks < 2 ? 1000U : 400U};
                     }});
  other = memory.claim("first", 600);
  EXPECT_THROW((void)memory.claim("second", 500), OutOfMemoryError);
  EXPECT_EQ(looks, 3);
  other = HostClaim();  // The account must outlive it.
}

TEST(HostClaim, RecheckSeesWhatOthersTook) {
  std::size_t available = 1000;
  HostMemory memory({.headroom_bytes = 200, .bytes_available = [&] { return available; }});
  auto claim = memory.claim("moments", 800);
  claim.recheck();
  claim.settle(500);
  available = 400;
  claim.recheck();  // 300 are still to be touched; half of the headroom stays.
  available = 399;
  EXPECT_THAT([&] { claim.recheck(); },
              Throws<OutOfMemoryError>(Property(&OutOfMemoryError::what, HasSubstr("300 B for moments, 299 B free"))));
  HostClaim().recheck();
}

TEST(HostClaim, MovesItsRight) {
  HostMemory memory({.budget_bytes = 1000, .bytes_available = [] { return std::size_t{1} << 40; }});
  auto first = memory.claim("a", 100);
  first.settle(100);
  HostClaim second(std::move(first));
  EXPECT_EQ(second.nbytes(), 100U);
  auto third = memory.claim("b", 200);
  third.settle(150);
  third = std::move(second);
  EXPECT_EQ(third.owner(), "a");
  EXPECT_EQ(memory.current_bytes(), 100U);
  EXPECT_EQ(memory.free_bytes(), 900U);
  third = HostClaim();
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.free_bytes(), 1000U);
}

TEST(HostClaim, CannotSettleMoreThanItHas) {
  HostMemory memory(machine_with(1000));
  auto claim = memory.claim("a", 100);
  claim.settle(60);
  EXPECT_THROW(claim.settle(41), InternalError);
  EXPECT_THROW(HostClaim().settle(0), InternalError);
}

TEST(HostClaim, DoesNothingInAForkedChild) {
  HostMemory memory(machine_with(1000));
  auto claim = memory.claim("a", 100);
  claim.settle(100);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    claim = HostClaim();
    ::_exit(memory.current_bytes() == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(HostMemory, ThreadsTogetherNeverPassTheBudget) {
  auto options = machine_with(std::size_t{1} << 40);
  options.budget_bytes = 300;
  HostMemory memory(options);
  std::atomic<int> refused{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 200; ++i) {
          try {
            auto claim = memory.claim("thread " + std::to_string(t), 100);
            claim.settle(100);
            claim.recheck();
          } catch (const OutOfMemoryError&) {
            ++refused;
          }
        }
      });
    }
  }
  EXPECT_LE(memory.peak_bytes(), 300U);
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.free_bytes(), 300U);
}

}  // namespace
}  // namespace pannier
