#include "pannier/mem/guarded_mapping.h"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <limits>
#include <system_error>
#include <utility>

namespace pannier {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

// Tells whether anything is mapped at the page of `address`.
bool is_mapped(const std::byte* address) {
  unsigned char resident = 0;
  const auto page = reinterpret_cast<std::uintptr_t>(address) / page_bytes() * page_bytes();
  return ::mincore(reinterpret_cast<void*>(page), page_bytes(), &resident) == 0;
}

TEST(GuardedMapping, MapsWholePagesAligned) {
  for (const std::size_t nbytes :
       {std::size_t{1}, page_bytes(), page_bytes() + 1, kHugePageBytes - 1, kHugePageBytes, 3 * kHugePageBytes + 5}) {
    const GuardedMapping mapping(nbytes);
    EXPECT_EQ(mapping.nbytes(), nbytes);
    EXPECT_EQ(mapping.mapped_bytes(), (nbytes + page_bytes() - 1) / page_bytes() * page_bytes());
    const auto alignment = mapping.mapped_bytes() >= kHugePageBytes ? kHugePageBytes : page_bytes();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mapping.begin()) % alignment, 0U) << nbytes;
    mapping.begin()[0] = std::byte{1};
    mapping.begin()[mapping.mapped_bytes() - 1] = std::byte{2};
  }
}

TEST(GuardedMapping, EmptyMapsNothing) {
  const GuardedMapping mapping(0);
  EXPECT_EQ(mapping.begin(), nullptr);
  EXPECT_EQ(mapping.mapped_bytes(), 0U);
}

TEST(GuardedMapping, GuardsFault) {
  const GuardedMapping mapping(page_bytes());
  for (const auto at : {std::ptrdiff_t{-1}, static_cast<std::ptrdiff_t>(page_bytes())}) {
    EXPECT_TRUE(is_mapped(mapping.begin() + at));
    EXPECT_DEATH(*static_cast<volatile std::byte*>(mapping.begin() + at) = std::byte{1}, "");
  }
}

TEST(GuardedMapping, UnmapsOnceWhateverMoves) {
  GuardedMapping first(page_bytes());
  auto* const begin = first.begin();
  GuardedMapping second(std::move(first));
  EXPECT_EQ(second.begin(), begin);
  GuardedMapping third(3 * page_bytes());
  auto* const replaced = third.begin();
  third = std::move(second);
  EXPECT_EQ(third.begin(), begin);
  EXPECT_FALSE(is_mapped(replaced + page_bytes()));
  EXPECT_TRUE(is_mapped(begin));
  third = GuardedMapping();
  EXPECT_FALSE(is_mapped(begin));
}

TEST(GuardedMapping, RefusalsOfTheKernelAreErrors) {
  EXPECT_THROW(GuardedMapping(std::size_t{1} << 60), std::system_error);
  EXPECT_THROW(GuardedMapping(std::numeric_limits<std::size_t>::max()), std::system_error);
}

TEST(GuardedMapping, ForkedChildrenNeitherInheritNorUnmap) {
  GuardedMapping mapping(page_bytes());
  auto* const begin = mapping.begin();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool inherited = is_mapped(begin);
    void* const other =
        ::mmap(begin, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    mapping = GuardedMapping();
    ::_exit(!inherited && other == begin && is_mapped(begin) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(RoundUpToPage, KeepsWhatNoMachineHolds) {
  EXPECT_EQ(round_up_to_page(0), 0U);
  EXPECT_EQ(round_up_to_page(1), page_bytes());
  EXPECT_EQ(round_up_to_page(std::numeric_limits<std::size_t>::max()), std::numeric_limits<std::size_t>::max());
}

}  // namespace
}  // namespace pannier
