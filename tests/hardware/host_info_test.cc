#include "pannier/hardware/host_info.h"

#include <gmock/gmock.h>
#include <sched.h>

#include <cmath>

#include "tests/hardware/fake_root.h"

namespace pannier {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::size_t kKiB = 1024;

void write_server(const FakeRoot& root) {
  root.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Test CPU 9000\nflags\t\t: fpu fma avx2 avx512f nonsense\n");
  root.write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 600 kB\nSwapTotal: 50 kB\n");
  root.write("proc/self/status",
             "Name:\tx\nVmSize:\t    100 kB\nCpus_allowed_list:\t0-7,16-23\nMems_allowed_list:\t0-1\n");
  root.write("proc/self/limits",
             "Limit                     Soft Limit           Hard Limit           Units\n"
             "Max locked memory         8388608              unlimited            bytes\n"
             "Max address space         unlimited            unlimited            bytes\n");
  root.write("proc/sys/kernel/osrelease", "6.1.0-test\n");
  root.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  root.write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
  root.write("sys/devices/system/node/online", "0-2\n");
  root.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 500 kB\nNode 0 MemFree: 200 kB\n");
  root.write("sys/devices/system/node/node0/cpulist", "0-7\n");
  root.write("sys/devices/system/node/node1/cpulist", "16-23\n");
}

TEST(HostInfo, ReadsAServer) {
  const FakeRoot root;
  write_server(root);
  const auto host = probe_host(root.path());
  EXPECT_EQ(host.cpu_model, "Test CPU 9000");
  EXPECT_THAT(host.instruction_sets, ElementsAre("avx2", "avx512f", "fma"));
  EXPECT_EQ(host.affinity_cores, 16);
  EXPECT_TRUE(std::isinf(host.cpu_quota));
  EXPECT_EQ(host.usable_cores, 16);
  EXPECT_EQ(host.memory.total_bytes, 1000 * kKiB);
  EXPECT_EQ(host.memory.available_bytes, 600 * kKiB);
  EXPECT_EQ(host.memory.swap_bytes, 50 * kKiB);
  EXPECT_EQ(host.memory.memlock_limit_bytes, 8388608U);
  EXPECT_EQ(host.memory.address_space_left_bytes, kUnlimitedBytes);
  EXPECT_EQ(host.huge_page_bytes, 2097152U);
  EXPECT_EQ(host.thp_mode, ThpMode::kMadvise);
  EXPECT_EQ(host.kernel_version, "6.1.0-test");
  EXPECT_FALSE(host.in_container);
  ASSERT_EQ(host.numa_nodes.size(), 2U);  // Node 2 is not allowed.
  EXPECT_EQ(host.numa_nodes[0].total_bytes, 500 * kKiB);
  EXPECT_EQ(host.numa_nodes[0].free_bytes, 200 * kKiB);
  EXPECT_EQ(host.numa_nodes[1].id, 1);
  EXPECT_EQ(host.numa_nodes[1].num_cores, 8);
  EXPECT_EQ(host.numa_nodes[1].total_bytes, 0U);
}

TEST(HostInfo, EmptyMachineIsUnknownAndUnlimited) {
  const FakeRoot root;
  const auto host = probe_host(root.path());
  EXPECT_EQ(host.usable_cores, 1);
  EXPECT_THAT(host.instruction_sets, IsEmpty());
  EXPECT_THAT(host.numa_nodes, IsEmpty());
  EXPECT_EQ(host.memory.memlock_limit_bytes, kUnlimitedBytes);
  EXPECT_EQ(host.thp_mode, ThpMode::kUnknown);
  EXPECT_EQ(host.huge_page_bytes, 0U);
  EXPECT_EQ(host_bytes_available(host), kUnlimitedBytes);
}

TEST(HostInfo, QuotaBoundsTheCores) {
  const FakeRoot root;
  write_server(root);
  root.write("proc/self/cgroup", "0::/\n");
  root.write("proc/self/mountinfo", "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  root.write("sys/fs/cgroup/cpu.max", "350000 100000\n");
  EXPECT_EQ(probe_host(root.path()).usable_cores, 3);
  root.write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(probe_host(root.path()).usable_cores, 1);
}

TEST(HostInfo, CoresOnlineStandInForAMissingAffinity) {
  const FakeRoot root;
  root.write("sys/devices/system/cpu/online", "0-5\n");
  EXPECT_EQ(probe_host(root.path()).usable_cores, 6);
}

TEST(HostInfo, ReadsArm) {
  const FakeRoot root;
  root.write("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve2 bf16\n");
  EXPECT_THAT(probe_host(root.path()).instruction_sets, ElementsAre("asimd", "bf16", "sve2"));
}

TEST(HostInfo, AvailableIsTheLeastOfMachineCgroupAndAddressSpace) {
  const FakeRoot root;
  write_server(root);
  EXPECT_EQ(host_bytes_available(probe_host(root.path())), 600 * kKiB);
  root.write("proc/self/cgroup", "0::/\n");
  root.write("sys/fs/cgroup/memory.max", std::to_string(500 * kKiB));
  root.write("sys/fs/cgroup/memory.current", std::to_string(200 * kKiB));
  root.write("sys/fs/cgroup/memory.stat", "inactive_file " + std::to_string(100 * kKiB));
  EXPECT_EQ(host_bytes_available(probe_memory(root.path())), 400 * kKiB);
  root.write("proc/self/limits", "Max address space         307200              unlimited            bytes\n");
  EXPECT_EQ(host_bytes_available(probe_memory(root.path())), 200 * kKiB);
  root.write("proc/self/limits", "Max address space         1024              unlimited            bytes\n");
  EXPECT_EQ(host_bytes_available(probe_memory(root.path())), 0U);
}

TEST(HostInfo, FreeMemoryStandsInForAMissingMemAvailable) {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 300 kB\n");
  EXPECT_EQ(probe_memory(root.path()).available_bytes, 300 * kKiB);
}

TEST(HostInfo, ReadsHugePageModes) {
  const FakeRoot root;
  const std::string enabled = "sys/kernel/mm/transparent_hugepage/enabled";
  root.write("proc/meminfo", "Hugepagesize: 2048 kB\n");
  root.write(enabled, "always madvise [never]\n");
  EXPECT_EQ(probe_host(root.path()).thp_mode, ThpMode::kNever);
  EXPECT_EQ(probe_host(root.path()).huge_page_bytes, 2048 * kKiB);
  root.write(enabled, "[always] madvise never\n");
  EXPECT_EQ(probe_host(root.path()).thp_mode, ThpMode::kAlways);
  root.write(enabled, "odd\n");
  EXPECT_EQ(probe_host(root.path()).thp_mode, ThpMode::kUnknown);
}

TEST(HostInfo, RecognisesContainers) {
  const std::pair<const char*, std::string> marks[] = {
      {".dockerenv", ""},
      {"run/.containerenv", ""},
      {"run/systemd/container", "lxc"},
      {"proc/1/cgroup", "0::/kubepods/pod1\n"},
      {"proc/1/environ", "container=podman"},
      {"proc/1/environ", std::string("A=b\0container=lxc\0", 18)},
  };
  for (const auto& [file, text] : marks) {
    const FakeRoot root;
    root.write(file, text);
    EXPECT_TRUE(probe_host(root.path()).in_container) << file;
  }
  const FakeRoot root;
  root.write("proc/1/environ", "mycontainer=1");
  EXPECT_FALSE(probe_host(root.path()).in_container);
}

TEST(HostInfo, ThisMachineAddsUp) {
  const auto host = probe_host();
  cpu_set_t allowed;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  EXPECT_EQ(host.affinity_cores, CPU_COUNT(&allowed));
  EXPECT_GE(host.usable_cores, 1);
  EXPECT_LE(host.usable_cores, host.affinity_cores);
  EXPECT_LE(host.memory.available_bytes, host.memory.total_bytes);
  EXPECT_GT(host_bytes_available(host), 0U);
  EXPECT_LE(host_bytes_available(host), host.memory.available_bytes);
  EXPECT_THAT(host.kernel_version, Not(IsEmpty()));
}

}  // namespace
}  // namespace pannier
