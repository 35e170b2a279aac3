#include "pannier/mem/host_slab.h"

#include <gmock/gmock.h>
#include <numa.h>
#include <numaif.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "pannier/base/thread_team.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Property;
using ::testing::Throws;

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A node that this process may use.
int first_node() {
  if (::numa_available() < 0) {
    return 0;
  }
  int node = 0;
  while (::numa_bitmask_isbitset(numa_all_nodes_ptr, static_cast<unsigned int>(node)) == 0) {
    ++node;
  }
  return node;
}

HostSlabOptions owned_by(const char* owner) { return {.owner = owner}; }

TEST(HostSlab, IsZeroAndWritable) {
  HostMemory memory;
  ThreadTeam team(3);
  for (const std::size_t nbytes : {std::size_t{1}, std::size_t{4096}, 5 * kMiB + 12}) {
    HostSlab slab(memory, nbytes, owned_by("test"), team.parallel_for());
    ASSERT_EQ(slab.data().size(), nbytes);
    EXPECT_TRUE(std::all_of(slab.data().begin(), slab.data().end(), [](auto b) { return b == std::byte{0}; }));
    std::fill(slab.data().begin(), slab.data().end(), std::byte{7});
    EXPECT_EQ(std::as_const(slab).data().back(), std::byte{7});
  }
}

TEST(HostSlab, KernelCountsWhatTheAccountSays) {
  HostMemory memory;
  ThreadTeam team(2);
  std::vector<HostSlab> slabs;  // Neighbours, small ones too: none may be counted with another.
  for (const bool huge : {true, false}) {
    for (const std::size_t nbytes : {std::size_t{100}, 3 * kMiB, 2 * kMiB, 64 * kMiB + 1, std::size_t{8192}}) {
      HostSlabOptions options = owned_by(huge ? "huge" : "small");
      options.huge_pages = huge;
      slabs.emplace_back(memory, nbytes, options, team.parallel_for());
    }
  }
  std::size_t resident = 0;
  for (const auto& slab : slabs) {
    EXPECT_LT(slab.mapped_bytes() - slab.nbytes(), 65536U);
    EXPECT_EQ(resident_bytes(slab), slab.mapped_bytes()) << slab.owner() << " " << slab.nbytes();
    resident += resident_bytes(slab);
  }
  EXPECT_EQ(memory.current_bytes(), resident);
  slabs.clear();
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.peak_bytes(), resident);
}

TEST(HostSlab, FillsMoreThanOneStep) {
  HostMemory memory;
  ThreadTeam team(2);
  const HostSlab slab(memory, 300 * kMiB, owned_by("test"), team.parallel_for());
  EXPECT_EQ(resident_bytes(slab), 300 * kMiB);
}

TEST(HostSlab, ViewsElements) {
  HostMemory memory;
  HostSlab slab(memory, 12, owned_by("test"));
  slab.as<float>()[2] = 1.5F;
  EXPECT_EQ(std::as_const(slab).as<float>().size(), 3U);
  EXPECT_EQ(std::as_const(slab).as<std::uint16_t>()[5], 0x3FC0);
  EXPECT_THROW((void)slab.as<double>(), InternalError);
}

TEST(HostSlab, EmptyOnesHoldNothing) {
  HostMemory memory;
  HostSlab none;
  HostSlab zero(memory, 0, owned_by("test"));
  EXPECT_TRUE(none.data().empty());
  EXPECT_TRUE(none.as<float>().empty());
  EXPECT_EQ(zero.mapped_bytes(), 0U);
  EXPECT_EQ(zero.owner(), "test");
  EXPECT_EQ(resident_bytes(zero), 0U);
  EXPECT_EQ(memory.current_bytes(), 0U);
}

TEST(HostSlab, MovesItsBytesAndItsAccount) {
  HostMemory memory;
  HostSlab first(memory, kMiB, owned_by("first"));
  const auto* const begin = first.data().data();
  HostSlab second(std::move(first));
  EXPECT_EQ(second.data().data(), begin);
  HostSlab third(memory, 2 * kMiB, owned_by("third"));
  third = std::move(second);
  EXPECT_EQ(third.data().data(), begin);
  EXPECT_EQ(third.owner(), "first");
  EXPECT_EQ(memory.current_bytes(), kMiB);
  third = HostSlab();
  EXPECT_EQ(memory.current_bytes(), 0U);
}

TEST(HostSlab, RefusesAboveTheBudgetBeforeTouching) {
  HostMemory memory({.budget_bytes = 4 * kMiB});
  const HostSlab fits(memory, 3 * kMiB, owned_by("fits"));
  EXPECT_THAT([&] { HostSlab(memory, kMiB + 1, owned_by("moments of wte")); },
              Throws<OutOfMemoryError>(Property(&OutOfMemoryError::what,
                                                AllOf(HasSubstr("for moments of wte"), HasSubstr("1.00 MiB free")))));
  EXPECT_EQ(memory.peak_bytes(), 3 * kMiB);
}

TEST(HostSlab, RefusesMoreThanTheMachineHas) {
  HostMemory memory;
  for (const auto nbytes : {std::size_t{1} << 50, std::numeric_limits<std::size_t>::max()}) {
    EXPECT_THROW(HostSlab(memory, nbytes, owned_by("x")), OutOfMemoryError);
  }
}

TEST(HostSlab, KernelRefusalIsOutOfMemoryAndGivesBack) {
  HostMemory memory({.bytes_available = [] { return std::numeric_limits<std::size_t>::max(); }});
  EXPECT_THAT([&] { HostSlab(memory, std::size_t{1} << 60, owned_by("master weights")); },
              Throws<OutOfMemoryError>(Property(
                  &OutOfMemoryError::what, AllOf(HasSubstr(" out of memory. "), HasSubstr("for master weights"),
                                                 HasSubstr("the kernel refused: "), HasSubstr("Cannot allocate")))));
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.peak_bytes(), 0U);
}

TEST(HostSlab, StopsHalfwayWhenOthersTakeTheRest) {
  int looks = 0;
  HostMemory memory({.headroom_bytes = 0, .bytes_available = [&] { return (looks++ == 0 ? 1024 : 8) * kMiB; }});
  EXPECT_THROW(HostSlab(memory, 300 * kMiB, owned_by("x")), OutOfMemoryError);
  EXPECT_EQ(memory.current_bytes(), 0U);
  EXPECT_EQ(memory.peak_bytes(), 256 * kMiB);
}

TEST(HostSlab, GivesBackWhenFillingThrows) {
  HostMemory memory;
  const ParallelFor broken = [](std::int64_t, std::int64_t, const auto&) { throw IoError("thread", EAGAIN); };
  EXPECT_THROW(HostSlab(memory, kMiB, owned_by("x"), broken), IoError);
  EXPECT_EQ(memory.current_bytes(), 0U);
}

// The kernel's NUMA policy for the first page, -1 where there is no NUMA.
int policy_of(const HostSlab& slab) {
  int mode = -1;
  void* const page = const_cast<std::byte*>(slab.data().data());
  return ::get_mempolicy(&mode, nullptr, 0, page, MPOL_F_ADDR) == 0 ? mode : -1;
}

TEST(HostSlab, PlacesOnNodes) {
  HostMemory memory;
  auto options = owned_by("test");
  EXPECT_TRUE(HostSlab(memory, 4096, options).numa_placed());
  options.numa_policy = NumaPolicy::kInterleave;
  const HostSlab interleaved(memory, 4 * kMiB, options);
  options.numa_policy = NumaPolicy::kNode;
  options.numa_node = first_node();
  const HostSlab on_node(memory, 4 * kMiB, options);
  EXPECT_EQ(resident_bytes(interleaved), 4 * kMiB);
  EXPECT_EQ(resident_bytes(on_node), 4 * kMiB);
  if (interleaved.numa_placed() && policy_of(interleaved) >= 0) {
    EXPECT_THAT(policy_of(interleaved), AnyOf(MPOL_INTERLEAVE, MPOL_DEFAULT));
    EXPECT_THAT(policy_of(on_node), AnyOf(MPOL_PREFERRED, MPOL_DEFAULT));
  }
}

// Runs `body` in a child process and returns its exit status.
template <class Body>
int run_in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(body());
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(HostSlab, RefusesAboveTheLimitOfTheProcess) {
  const int status = run_in_child([] {
    std::ifstream file("/proc/self/statm");
    rlim_t pages = 0;
    file >> pages;
    const rlim_t limit = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + 256 * kMiB;
    const rlimit space{limit, limit};
    if (::setrlimit(RLIMIT_AS, &space) != 0) {
      return 1;
    }
    HostMemory memory;
    const HostSlab fits(memory, 16 * kMiB, owned_by("fits"));
    try {
      const HostSlab too_large(memory, 240 * kMiB, owned_by("moments"));
      return 2;
    } catch (const OutOfMemoryError& error) {
      const std::string message = error.what();
      const bool told = message.find("240.00 MiB for moments") != std::string::npos;
      return told && memory.peak_bytes() == 16 * kMiB ? 0 : 3;
    }
  });
  EXPECT_EQ(status, 0) << "exit status " << WEXITSTATUS(status);
}

TEST(HostSlab, DoesNothingInAForkedChild) {
  HostMemory memory;
  HostSlab slab(memory, kMiB, owned_by("test"));
  EXPECT_EQ(run_in_child([&] {
              slab = HostSlab();
              return memory.current_bytes() == kMiB ? 0 : 1;
            }),
            0);
  EXPECT_EQ(resident_bytes(slab), kMiB);
}

TEST(HostSlab, RefusesNodesThatAreNotThere) {
  HostMemory memory;
  auto options = owned_by("test");
  options.numa_policy = NumaPolicy::kNode;
  for (const int node : {1000, 100000}) {
    options.numa_node = node;
    EXPECT_THROW(HostSlab(memory, 4096, options), ConfigError) << node;
  }
  EXPECT_EQ(memory.current_bytes(), 0U);
}

TEST(HostSlabOptions, RefusesContradictions) {
  EXPECT_THROW(HostSlabOptions{}.validate(), ConfigError);
  EXPECT_THROW((HostSlabOptions{.owner = "x", .numa_policy = NumaPolicy::kNode}.validate()), ConfigError);
  EXPECT_THROW((HostSlabOptions{.owner = "x", .numa_node = 0}.validate()), ConfigError);
  EXPECT_THROW((HostSlabOptions{.owner = "x", .numa_policy = NumaPolicy::kNode, .numa_node = -2}.validate()),
               ConfigError);
  EXPECT_NO_THROW(owned_by("x").validate());
}

}  // namespace
}  // namespace pannier
