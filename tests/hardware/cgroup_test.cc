#include "pannier/hardware/cgroup.h"

#include <gmock/gmock.h>

#include <cmath>

#include "tests/hardware/fake_root.h"

namespace pannier {
namespace {

constexpr const char* kMountV2 = "25 20 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* kMountsV1 =
    "31 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

TEST(Cgroup, NothingReadableLimitsNothing) {
  const FakeRoot root;
  const auto limits = probe_cgroup(root.path());
  EXPECT_EQ(limits.memory.limit_bytes, kUnlimitedBytes);
  EXPECT_EQ(limits.memory.room_bytes(), kUnlimitedBytes);
  EXPECT_TRUE(std::isinf(limits.cpu_quota));
}

TEST(Cgroup, V2CountsTheTightestAncestor) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/a/b\n");
  root.write("proc/self/mountinfo", kMountV2);
  root.write("sys/fs/cgroup/a/b/memory.max", "max\n");
  root.write("sys/fs/cgroup/a/b/memory.high", "max\n");
  root.write("sys/fs/cgroup/a/memory.max", "1000\n");
  root.write("sys/fs/cgroup/a/memory.current", "700\n");
  root.write("sys/fs/cgroup/a/memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
  root.write("sys/fs/cgroup/memory.max", "900\n");
  root.write("sys/fs/cgroup/memory.current", "100\n");
  root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  root.write("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
  const auto limits = probe_cgroup(root.path());
  EXPECT_EQ(limits.memory.limit_bytes, 1000U);
  EXPECT_EQ(limits.memory.current_bytes, 700U);
  EXPECT_EQ(limits.memory.reclaimable_bytes, 150U);
  EXPECT_EQ(limits.memory.room_bytes(), 450U);
  EXPECT_EQ(limits.memory.folder, (root.path() / "sys/fs/cgroup/a").string());
  EXPECT_DOUBLE_EQ(limits.cpu_quota, 2.5);
}

TEST(Cgroup, V2ThrottlingCountsAsALimit) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/\n");
  root.write("proc/self/mountinfo", kMountV2);
  root.write("sys/fs/cgroup/memory.max", "1000\n");
  root.write("sys/fs/cgroup/memory.high", "600\n");
  EXPECT_EQ(probe_cgroup_memory(root.path()).limit_bytes, 600U);
}

TEST(Cgroup, V1ReadsItsOwnFiles) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n");
  root.write("proc/self/mountinfo", kMountsV1);
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n");
  root.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "3000\n");
  root.write("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000\n");
  root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  const auto limits = probe_cgroup(root.path());
  EXPECT_EQ(limits.memory.limit_bytes, 5000U);
  EXPECT_EQ(limits.memory.room_bytes(), 2500U);
  EXPECT_DOUBLE_EQ(limits.cpu_quota, 4.0);
}

TEST(Cgroup, HugeV1ValuesMeanNoLimit) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:memory:/\n");
  root.write("proc/self/mountinfo", kMountsV1);
  for (const char* limit : {"9223372036854771712", "18446744073709551615", "99999999999999999999999", "junk", ""}) {
    root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", limit);
    EXPECT_EQ(probe_cgroup_memory(root.path()).room_bytes(), kUnlimitedBytes) << limit;
  }
}

TEST(Cgroup, MixedSystemsTakeTheTighterVersion) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:memory:/job\n0::/job\n");
  root.write("proc/self/mountinfo",
             std::string(kMountsV1) + "33 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "5000\n");
  root.write("sys/fs/cgroup/unified/job/memory.max", "4000\n");
  EXPECT_EQ(probe_cgroup_memory(root.path()).limit_bytes, 4000U);
}

TEST(Cgroup, ContainersSeeOnlyTheirPartOfTheHierarchy) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:memory:/docker/abc/inner\n");
  root.write("proc/self/mountinfo",
             "30 29 0:28 /docker/other /mnt/other rw - cgroup cgroup rw,memory\n"
             "31 29 0:28 /docker/abc /sys/fs/my\\040cgroup rw - cgroup cgroup rw,memory\n");
  root.write("mnt/other/memory.limit_in_bytes", "1\n");
  root.write("sys/fs/my cgroup/memory.limit_in_bytes", "7000\n");
  root.write("sys/fs/my cgroup/inner/memory.limit_in_bytes", "6000\n");
  EXPECT_EQ(probe_cgroup_memory(root.path()).limit_bytes, 6000U);
}

TEST(Cgroup, GroupsOutsideOfTheMountCountAsTheMount) {
  const FakeRoot root;
  root.write("proc/self/mountinfo", kMountV2);
  root.write("sys/fs/cgroup/memory.max", "800\n");
  root.write("other/memory.max", "1\n");
  for (const char* group : {"0::/../../../other\n", "0::/gone\n"}) {
    root.write("proc/self/cgroup", group);
    EXPECT_EQ(probe_cgroup_memory(root.path()).limit_bytes, 800U) << group;
  }
}

TEST(Cgroup, WorksWithoutMountinfo) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "4:memory:/job\n0::/job\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "800\n");
  root.write("sys/fs/cgroup/job/memory.max", "900\n");
  EXPECT_EQ(probe_cgroup_memory(root.path()).limit_bytes, 800U);
}

TEST(Cgroup, UseAboveTheLimitLeavesNoRoom) {
  const CgroupMemory memory{.limit_bytes = 100, .current_bytes = 180, .reclaimable_bytes = 30, .folder = ""};
  EXPECT_EQ(memory.room_bytes(), 0U);
}

TEST(Cgroup, MangledLinesAreIgnored) {
  const FakeRoot root;
  root.write("proc/self/cgroup", "\nnonsense\n1:\n0::/\n");
  root.write("proc/self/mountinfo", "\nshort line\n1 2 3 4 5 -\n1 2 3 4 5 - cgroup2\n" + std::string(kMountV2));
  root.write("sys/fs/cgroup/memory.max", "800\n");
  root.write("sys/fs/cgroup/cpu.max", "0 0\n");
  const auto limits = probe_cgroup(root.path());
  EXPECT_EQ(limits.memory.limit_bytes, 800U);
  EXPECT_TRUE(std::isinf(limits.cpu_quota));
}

}  // namespace
}  // namespace pannier
