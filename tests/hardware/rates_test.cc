#include "pannier/hardware/rates.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <limits>
#include <thread>

#include "tests/hardware/fake_root.h"

namespace pannier {
namespace {

const MachineIdentity kMachine{.cpu_model = "A CPU @ 2.0 GHz", .num_cores = 16, .device_names = {"A GPU"}};

constexpr std::size_t kSmallCopy = 1 << 16;

// Counts how often something is measured.
struct Probes {
  int updates = 0;
  int links = 0;
  RateProbes probes() {
    return {.host_update =
                [this](double) {
                  ++updates;
                  return 4e9;
                },
            .links =
                [this](double) {
                  ++links;
                  return LinkRates{.up = 55e9, .down = 54e9, .up_both = 51e9, .down_both = 50e9, .device_copy = 4e12};
                },
            .copy_nbytes = kSmallCopy,
            .root = root.path()};
  }
  FakeRoot root;  ///< Says nothing: who else runs on this machine must not matter.
};

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

TEST(CachedRates, MeasureOnceAMachine) {
  const FakeRoot folder;
  Probes counts;
  const auto first = cached_rates(folder.path() / "made/here", kMachine, counts.probes());
  EXPECT_EQ(first.origin, RateOrigin::kProbe);
  EXPECT_GT(first.rates.dram, 0);
  const auto second = cached_rates(folder.path() / "made/here", kMachine, counts.probes());
  EXPECT_EQ(second.origin, RateOrigin::kCache);
  EXPECT_EQ(counts.updates, 1);
  EXPECT_EQ(counts.links, 1);
  EXPECT_DOUBLE_EQ(second.rates.dram, first.rates.dram);
  EXPECT_DOUBLE_EQ(second.rates.up, 55e9);
  EXPECT_DOUBLE_EQ(second.rates.down_both, 50e9);
  EXPECT_DOUBLE_EQ(second.rates.device_copy, 4e12);
  MachineIdentity other = kMachine;
  other.device_names = {"Another GPU"};
  EXPECT_EQ(cached_rates(folder.path() / "made/here", other, counts.probes()).origin, RateOrigin::kProbe);
}

TEST(CachedRates, LeaveNoOtherFileBehind) {
  const FakeRoot folder;
  Probes counts;
  (void)cached_rates(folder.path(), kMachine, counts.probes());
  const auto begin = std::filesystem::directory_iterator(folder.path());
  EXPECT_EQ(std::distance(begin, {}), 1);
}

TEST(CachedRates, MeasureAnewWhatIsDamagedForeignOrOld) {
  const FakeRoot folder;
  Probes counts;
  (void)cached_rates(folder.path(), kMachine, counts.probes());
  const auto file = rates_cache_file(folder.path(), kMachine);
  const std::string good = text_of(file);
  const auto with = [&](const std::string& old_text, const std::string& new_text) {
    std::string text = good;
    return text.replace(text.find(old_text), old_text.size(), new_text);
  };
  for (const std::string& bad :
       {std::string(), std::string("{"), std::string("null"), std::string("[1]"), good.substr(0, good.size() / 2),
        with("pannier-hardware", "other"), with("\"version\": 3", "\"version\": 0"), with("A CPU", "B CPU"),
        with("\"up\": 55000000000.0", "\"up\": -1"), with("\"up\": 55000000000.0", "\"up\": \"fast\""),
        with("\"up\": 55000000000.0", "\"up\": 0"), with("\"up\": 55000000000.0", "\"up\": 1e300"),
        with("\"rates\"", "\"rated\""), std::string(100000, ' ') + good, std::string("\xff\xfe\0{", 4)}) {
    std::ofstream(file, std::ios::binary) << bad;
    const auto measured = cached_rates(folder.path(), kMachine, counts.probes());
    EXPECT_EQ(measured.origin, RateOrigin::kProbe) << bad;
    EXPECT_DOUBLE_EQ(measured.rates.up, 55e9);
    EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kCache) << "not repaired";
  }
}

TEST(CachedRates, MeasureAnewWhatAnEarlierProbeCouldNot) {
  const FakeRoot folder;
  Probes counts;
  (void)cached_rates(folder.path(), kMachine, {.copy_nbytes = kSmallCopy, .root = counts.root.path()});
  EXPECT_EQ(cached_rates(folder.path(), kMachine, {.copy_nbytes = kSmallCopy, .root = counts.root.path()}).origin,
            RateOrigin::kCache);
  EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kProbe);
}

TEST(CachedRates, DoWithoutAFolderThatCanBeWritten) {
  const FakeRoot folder;
  folder.write("file", "");
  Probes counts;
  EXPECT_EQ(cached_rates(folder.path() / "file/below", kMachine, counts.probes()).origin, RateOrigin::kProbe);
  EXPECT_EQ(cached_rates("/proc/nowhere", kMachine, counts.probes()).origin, RateOrigin::kProbe);
  EXPECT_EQ(cached_rates("", kMachine, counts.probes()).origin, RateOrigin::kProbe);
  // A folder in the file's place can't be replaced, and a pipe is never opened.
  const auto file = rates_cache_file(folder.path(), kMachine);
  std::filesystem::create_directories(file / "full");
  EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kProbe);
  std::filesystem::remove_all(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kProbe);
}

// A machine of two cores, one of which others use for `busy` hundredths of a second while the update is measured.
struct BusyMachine : Probes {
  explicit BusyMachine(int hundredths) : busy(hundredths) {
    root.write("proc/self/status", "Cpus_allowed_list:\t0-1\n");
    pass(0, 0);
  }
  // Hundredths of a second that have gone by, and of which others were busy on one core.
  void pass(int all, int busy_of_all) const {
    root.write("proc/stat", fmt::format("cpu0 {} 0 0 {} 0 0 0 0 0 0\ncpu1 0 0 0 {} 0 0 0 0 0 0\n", busy_of_all,
                                        all - busy_of_all, all));
  }
  RateProbes probes() {
    RateProbes all = Probes::probes();
    all.host_update = [this](double) {
      ++updates;
      pass(100, busy);
      return 4e9;
    };
    return all;
  }
  int busy;
};

TEST(CachedRates, OfABusyMachineCountForAMinute) {
  for (const int busy : {90, 1}) {
    const FakeRoot folder;
    BusyMachine counts(busy);
    (void)cached_rates(folder.path(), kMachine, counts.probes());
    EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kCache) << busy;
    const auto file = rates_cache_file(folder.path(), kMachine);
    std::filesystem::last_write_time(file, std::filesystem::last_write_time(file) - std::chrono::minutes(2));
    const bool is_quiet = busy < 10;
    EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin,
              is_quiet ? RateOrigin::kCache : RateOrigin::kProbe);
  }
}

TEST(CachedRates, AreMeasuredByOneOfSeveralProcessesAndWholeForAll) {
  const FakeRoot folder;
  std::atomic<int> measured = 0;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      Probes counts;
      const MeasuredRates found = cached_rates(folder.path(), kMachine, counts.probes());
      EXPECT_DOUBLE_EQ(found.rates.up, 55e9);
      measured += found.origin == RateOrigin::kProbe ? 1 : 0;
    });
  }
  threads.clear();
  EXPECT_EQ(measured, 1);
  Probes counts;
  EXPECT_EQ(cached_rates(folder.path(), kMachine, counts.probes()).origin, RateOrigin::kCache);
}

// What each probe was given, of `most_seconds` for all.
struct GivenSeconds {
  double update = 0;
  double links = 0;
  LinkAndHostRates rates;
};

GivenSeconds given_seconds(double most_seconds) {
  GivenSeconds given;
  given.rates = probe_rates({.host_update =
                                 [&](double seconds) {
                                   given.update = seconds;
                                   return std::numeric_limits<double>::quiet_NaN();
                                 },
                             .links =
                                 [&](double seconds) {
                                   given.links = seconds;
                                   return LinkRates{.up = 1e9};
                                 },
                             .most_seconds = most_seconds,
                             .copy_nbytes = kSmallCopy});
  return given;
}

TEST(ProbeRates, SharesTheTimeAndLeavesTheRestUnknown) {
  const auto given = given_seconds(1e6);
  EXPECT_LE(given.update + given.links, 1e6 * 1.4);
  EXPECT_GT(given.update, 0.3e6);
  EXPECT_GT(given.links, 0.9e6);
  EXPECT_DOUBLE_EQ(given.rates.host_update, 0);
  EXPECT_DOUBLE_EQ(given.rates.up, 1e9);
  EXPECT_DOUBLE_EQ(given.rates.down, 0);
}

TEST(ProbeRates, LeavesEachProbeSomeTimeOnASlowMachine) {
  constexpr double kLessThanTheCopyTakes = 1e-9;
  const auto given = given_seconds(kLessThanTheCopyTakes);
  EXPECT_DOUBLE_EQ(given.update, 0.1 * kLessThanTheCopyTakes);
  EXPECT_DOUBLE_EQ(given.links, 0.1 * kLessThanTheCopyTakes);
}

TEST(ProbeRates, MemoryGivesAtLeastWhatTheUpdateMoved) {
  const auto rates = probe_rates({.host_update = [](double) { return 1e13; }, .copy_nbytes = kSmallCopy});
  EXPECT_DOUBLE_EQ(rates.dram, 1e13 * kRatedUpdateNbytes);
}

TEST(RatesCacheFolder, FollowsTheXdgRules) {
  const char* old_cache = std::getenv("XDG_CACHE_HOME");
  const char* old_home = std::getenv("HOME");
  const std::string cache = old_cache == nullptr ? "" : old_cache;
  const std::string home = old_home == nullptr ? "" : old_home;
  ::setenv("XDG_CACHE_HOME", "/a", 1);
  ::setenv("HOME", "/b", 1);
  EXPECT_EQ(rates_cache_folder(), "/a/pannier");
  ::setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(rates_cache_folder(), "/b/.cache/pannier");
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("HOME");
  EXPECT_TRUE(rates_cache_folder().empty());
  if (old_cache != nullptr) {
    ::setenv("XDG_CACHE_HOME", cache.c_str(), 1);
  }
  if (old_home != nullptr) {
    ::setenv("HOME", home.c_str(), 1);
  }
}

TEST(IdentifyMachine, KnowsTheProcessorAndItsCores) {
  const FakeRoot root;
  root.write("proc/cpuinfo", "model name : A CPU\xff\n");
  root.write("proc/self/status", "Cpus_allowed_list:\t0-3\n");
  const auto machine = identify_machine({"A GPU"}, root.path());
  EXPECT_EQ(machine.cpu_model, "A CPU\xff");
  EXPECT_EQ(machine.num_cores, 4);
  Probes counts;
  const FakeRoot folder;
  (void)cached_rates(folder.path(), machine, counts.probes());  // A name that is not UTF-8 is no error.
  EXPECT_EQ(cached_rates(folder.path(), machine, counts.probes()).origin, RateOrigin::kCache);
}

}  // namespace
}  // namespace pannier
