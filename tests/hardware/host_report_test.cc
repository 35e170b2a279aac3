#include "pannier/hardware/host_report.h"

#include <gmock/gmock.h>

#include <limits>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::size_t kGiB = std::size_t{1} << 30;

HostInfo good_host() {
  HostInfo host;
  host.cpu_model = "Test CPU";
  host.instruction_sets = {"avx2", "fma"};
  host.affinity_cores = host.usable_cores = 16;
  host.cpu_quota = std::numeric_limits<double>::infinity();
  host.memory.total_bytes = 128 * kGiB;
  host.memory.available_bytes = 100 * kGiB;
  host.numa_nodes = {{.id = 0, .num_cores = 16, .total_bytes = 128 * kGiB, .free_bytes = 90 * kGiB}};
  host.huge_page_bytes = 2 << 20;
  host.thp_mode = ThpMode::kMadvise;
  host.kernel_version = "6.1.0";
  return host;
}

ReportLine line_of(const HostInfo& host, const std::string& name) {
  for (auto& line : report(host)) {
    if (line.name == name) {
      return line;
    }
  }
  throw InternalError("no line " + name);
}

TEST(HostReport, GoodHostNeedsNoAdvice) {
  for (const auto& line : report(good_host())) {
    EXPECT_THAT(line.advice, IsEmpty()) << line.name;
  }
  EXPECT_EQ(line_of(good_host(), "cores").value, "16 usable (affinity 16, no quota)");
  EXPECT_EQ(line_of(good_host(), "memory").value, "128.00 GiB, 100.00 GiB available");
  EXPECT_EQ(line_of(good_host(), "NUMA nodes").value, "0: 16 cores, 128.00 GiB, 90.00 GiB free");
}

TEST(HostReport, UnknownHostIsSaidToBeUnknown) {
  const HostInfo host;
  EXPECT_EQ(line_of(host, "processor").value, "unknown");
  EXPECT_EQ(line_of(host, "instruction sets").value, "unknown");
  EXPECT_EQ(line_of(host, "memory").value, "unknown, unknown available");
  EXPECT_EQ(line_of(host, "huge pages").value, "unknown, none");
  EXPECT_EQ(line_of(host, "NUMA nodes").value, "unknown");
}

TEST(HostReport, AdvisesOnWhatWillHurt) {
  auto host = good_host();
  host.memory.memlock_limit_bytes = 8 << 20;
  host.memory.swap_bytes = kGiB;
  host.memory.address_space_left_bytes = 10 * kGiB;
  host.memory.cgroup = {.limit_bytes = 8 * kGiB, .current_bytes = 3 * kGiB, .reclaimable_bytes = kGiB, .folder = "/g"};
  host.thp_mode = ThpMode::kNever;
  host.usable_cores = 1;
  host.cpu_quota = 1.5;
  host.instruction_sets = {"avx2"};
  EXPECT_THAT(line_of(host, "locked memory").advice, HasSubstr("memlock"));
  EXPECT_THAT(line_of(host, "swap").advice, HasSubstr("swapoff"));
  EXPECT_THAT(line_of(host, "huge pages").advice, HasSubstr("madvise"));
  EXPECT_THAT(line_of(host, "cgroup memory").advice, HasSubstr("only 6.00 GiB can be offloaded"));
  EXPECT_THAT(line_of(host, "cgroup memory").value, HasSubstr("limit 8.00 GiB, 3.00 GiB used, 1.00 GiB of it"));
  EXPECT_THAT(line_of(host, "cores").advice, HasSubstr("one core"));
  EXPECT_EQ(line_of(host, "cores").value, "1 usable (affinity 16, quota 1.50)");
  EXPECT_THAT(line_of(host, "instruction sets").advice, HasSubstr("AVX2"));
  EXPECT_THAT(line_of(host, "address space").advice, HasSubstr("ulimit -v"));
}

TEST(HostReport, WideCgroupLimitNeedsNoAdvice) {
  auto host = good_host();
  host.memory.cgroup.limit_bytes = 127 * kGiB;
  EXPECT_THAT(line_of(host, "cgroup memory").advice, IsEmpty());
}

TEST(HostReport, SaysContainer) {
  auto host = good_host();
  host.in_container = true;
  EXPECT_EQ(line_of(host, "kernel").value, "6.1.0 (in a container)");
}

}  // namespace
}  // namespace pannier
