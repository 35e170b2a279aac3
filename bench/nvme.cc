// How close io/ comes to what a disk gives fio: the same already-written file, piece size and depth, runs of either in
// turn, medians as JSON lines. fio is given what our engine has, huge pages and registered buffers (with small pages it
// moves less than half: a request of 1 MiB is then 256 segments for the disk). It opens our scratch file through /proc,
// since it has no name. Without fio on the machine its figures are 0.
//
// usage: bench_nvme FOLDER [file MiB (1024)] [piece KiB (1024)] [depth (32)] [seconds (2)] [rounds (5)]
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pannier/io/disk_rates.h"

namespace pannier {
namespace {

struct Traffic {
  DiskTraffic kind;
  const char* name;
  const char* fio_name;
};
constexpr std::array kTraffics = {Traffic{DiskTraffic::kRead, "read", "read"},
                                  Traffic{DiskTraffic::kWrite, "write", "write"},
                                  Traffic{DiskTraffic::kMixed, "mixed", "rw"}};

std::string output_of(const std::string& command) {
  std::string output;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), &::pclose);
  std::array<char, 4096> part{};
  while (pipe != nullptr && std::fgets(part.data(), part.size(), pipe.get()) != nullptr) {
    output += part.data();
  }
  return output;
}

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

nlohmann::json summary(std::vector<double> rates) {
  std::sort(rates.begin(), rates.end());
  const auto gb = [](double rate) { return std::round(rate / 1e6) / 1e3; };
  return {{"median_gb_s", gb(rates[rates.size() / 2])}, {"least", gb(rates.front())}, {"most", gb(rates.back())}};
}

void run(const std::string& folder, const DiskRateOptions& options, int rounds) {
  HostMemory memory;
  DiskRateOptions with_threads = options;
  with_threads.engine.kind = IoEngineKind::kThreads;
  DiskRateProbe ours(memory, {folder}, options);
  DiskRateProbe threads(memory, {folder}, with_threads);
  for (const auto& note : ours.file().notes()) {
    std::fprintf(stderr, "bench_nvme: %s\n", note.c_str());
  }
  for (const auto& note : ours.engine().notes()) {
    std::fprintf(stderr, "bench_nvme: %s\n", note.c_str());
  }
  for (const auto& traffic : kTraffics) {
    std::vector<double> of_ours;
    std::vector<double> of_threads;
    std::vector<double> of_fio;
    std::vector<double> ratios;
    for (int i = 0; i < rounds; ++i) {
      of_ours.push_back(ours.measure(traffic.kind));
      of_fio.push_back(fio_rate(ours.file(), options, traffic.fio_name));
      of_threads.push_back(threads.measure(traffic.kind));
      ratios.push_back(of_fio.back() > 0 ? of_ours.back() / of_fio.back() : 0);
    }
    std::sort(ratios.begin(), ratios.end());
    const nlohmann::json line = {{"traffic", traffic.name},
                                 {"engine", ours.engine_name()},
                                 {"direct", ours.file().is_direct()},
                                 {"piece_bytes", options.engine.piece_nbytes},
                                 {"depth", options.engine.depth},
                                 {"ours", summary(of_ours)},
                                 {"threads", summary(of_threads)},
                                 {"fio", summary(of_fio)},
                                 {"ours_to_fio", std::round(ratios[ratios.size() / 2] * 1000) / 1000}};
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace pannier

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_nvme FOLDER [file MiB] [piece KiB] [depth] [seconds] [rounds]\n");
    return 2;
  }
  const auto number = [&](int index, long otherwise) { return argc > index ? std::atol(argv[index]) : otherwise; };
  try {
    pannier::DiskRateOptions options;
    options.file_nbytes = static_cast<std::size_t>(number(2, 1024)) << 20;
    options.engine.piece_nbytes = static_cast<std::size_t>(number(3, 1024)) << 10;
    options.engine.depth = static_cast<int>(number(4, 32));
    options.seconds = static_cast<double>(number(5, 2));
    pannier::run(argv[1], options, static_cast<int>(std::max(1L, number(6, 5))));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_nvme: %s\n", error.what());
    return 1;
  }
}
