// pannier bench nvme: how fast the engine's file of states can be read, written, and both, in a folder, beside fio
// where it is installed: the same already-written file, piece size and depth, runs of either in turn. fio is given what
// our engine has, huge pages and registered buffers (with small pages a request of 1 MiB is 256 segments for the disk,
// and it moves less than half). It opens our file through /proc, since that has no name. Then what an update adds to
// the time of the reads and writes of its states.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/disk_update.h"
#include "pannier/base/units.h"
#include "pannier/device/compute.h"
#include "pannier/io/disk_rates.h"

namespace pannier::cli {
namespace {

struct Traffic {
  DiskTraffic kind;
  const char* name;
  const char* fio_name;
};
constexpr std::array kTraffics = {Traffic{DiskTraffic::kRead, "read", "read"},
                                  Traffic{DiskTraffic::kWrite, "write", "write"},
                                  Traffic{DiskTraffic::kMixed, "read and write", "rw"}};

struct NvmeFlags {
  std::string folder;
  std::size_t mebibytes = 1024;
  std::size_t piece_kibibytes = 1024;
  int depth = 32;
  double seconds = 1;
  int repeats = 5;
  bool threads = false;
};

std::string output_of(const std::string& command) {
  std::string output;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  std::array<char, 4096> part{};
  while (pipe != nullptr && std::fgets(part.data(), part.size(), pipe.get()) != nullptr) {
    output += part.data();
  }
  return output;
}

// Bytes per second; 0 where fio is not there or fails.
double fio_rate(const DiskFile& file, const DiskRateOptions& options, const char* traffic) {
  const auto text = output_of(fmt::format(
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 fio --name=peer --thread --ioengine=io_uring --fixedbufs=1 "
      "--registerfiles=1 --filename=/proc/{}/fd/{} --size={} --bs={} --iodepth={} --direct={} --rw={} --time_based "
      "--runtime={} --overwrite=1 --allow_file_create=0 --output-format=json 2>/dev/null",
      ::getpid(), file.fd(0), options.file_nbytes, options.engine.piece_nbytes, options.engine.depth,
      file.is_direct() ? 1 : 0, traffic, options.seconds));
  const auto report = nlohmann::json::parse(text, nullptr, false);
  if (report.is_discarded() || !report.contains("jobs")) {
    return 0;
  }
  const auto& job = report["jobs"][0];
  return job["read"]["bw_bytes"].get<double>() + job["write"]["bw_bytes"].get<double>();
}

void bench_nvme(const NvmeFlags& flags) {
  DiskRateOptions options;
  options.file_nbytes = flags.mebibytes << 20;
  options.request_nbytes = std::min(options.request_nbytes, options.file_nbytes / 2);
  options.seconds = flags.seconds;
  options.engine.piece_nbytes = flags.piece_kibibytes << 10;
  options.engine.depth = flags.depth;
  options.engine.kind = flags.threads ? IoEngineKind::kThreads : IoEngineKind::kAuto;
  HostMemory memory;
  DiskRateProbe probe(memory, {flags.folder}, options);
  fmt::print("{} by {}, {}, pieces of {}, {} at a time\n", format_bytes(options.file_nbytes), probe.engine_name(),
             probe.file().is_direct() ? "direct" : "through the page cache", format_bytes(options.engine.piece_nbytes),
             flags.depth);
  for (const auto* notes : {&probe.file().notes(), &probe.engine().notes()}) {
    for (const std::string& note : *notes) {
      fmt::print("note: {}\n", note);
    }
  }
  for (const Traffic& traffic : kTraffics) {
    std::vector<double> ours;
    std::vector<double> of_fio;
    std::vector<double> ratios;
    for (int i = 0; i < flags.repeats; ++i) {
      ours.push_back(probe.measure(traffic.kind));
      of_fio.push_back(fio_rate(probe.file(), options, traffic.fio_name));
      ratios.push_back(of_fio.back() > 0 ? ours.back() / of_fio.back() : 0);
    }
    const double fio = median(of_fio);
    fmt::print("{:<16}{:>7.2f} GB/s{}\n", traffic.name, median(ours) / 1e9,
               fio > 0 ? fmt::format(", {} of fio's {:.2f} GB/s", percent_of(median(ratios), 1.0), fio / 1e9)
                       : ", fio is not installed");
  }
}

// Passes with and without the update in turn: two of each begin at the same end of the file.
void bench_update_on_disk(const NvmeFlags& flags) {
  constexpr int kMostForADisk = 4;  // As the engine has it.
  DiskUpdate states(flags.folder, flags.mebibytes << 20, std::clamp(host_threads() / 2, 1, kMostForADisk));
  (void)states.pass(true);
  std::vector<double> rates;
  std::vector<double> ratios;
  for (int i = 0; i < flags.repeats; ++i) {
    const double before = states.moved_nbytes();
    const double with = states.pass(true) + states.pass(true);
    rates.push_back((states.moved_nbytes() - before) / with);
    ratios.push_back(with / (states.pass(false) + states.pass(false)));
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  fmt::print("{:<16}{:>7.2f} GB/s, {:+.1f} % of the time that its reads and writes take alone ({:+.1f} to {:+.1f})\n",
             "update", median(rates) / 1e9, 100 * (median(ratios) - 1), 100 * (*least - 1), 100 * (*most - 1));
}

}  // namespace

void add_bench_nvme(CLI::App& bench) {
  auto* command = bench.add_subcommand("nvme", "Reads and writes of a folder's disk, beside fio where it is installed");
  command->footer("Example:\n  pannier bench nvme /mnt/nvme --mebibytes 4096");
  auto flags = std::make_shared<NvmeFlags>();
  command->add_option("path", flags->folder, "The folder")->required();
  command->add_option("--mebibytes", flags->mebibytes, "Of the file")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--piece-kibibytes", flags->piece_kibibytes, "Of one request to the kernel, a multiple of 4")
      ->check(CLI::Range(4, 1 << 16))
      ->capture_default_str();
  command->add_option("--depth", flags->depth, "Pieces at the disk at one time")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--seconds", flags->seconds, "Of each measurement")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--repeats", flags->repeats, "Repetitions; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--threads", flags->threads, "Without io_uring");
  command->callback([flags] {
    bench_nvme(*flags);
    bench_update_on_disk(*flags);
  });
}

}  // namespace pannier::cli
