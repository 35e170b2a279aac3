// pannier doctor: what this machine can do, and what will hinder training.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/commands.h"
#include "pannier/base/thread_team.h"
#include "pannier/base/units.h"
#include "pannier/hardware/copy_bandwidth.h"
#include "pannier/hardware/host_info.h"
#include "pannier/hardware/host_report.h"
#include "pannier/io/disk_rates.h"
#include "pannier/io/folder.h"
#include "pannier/kernels/update.h"

namespace pannier::cli {
namespace {

constexpr double kSecondsPerDay = 86400;

// The disk that states would rest on, and what training at its full pace would write to it.
void look_at_disk(const std::string& path) {
  const FolderInfo folder = look_at_folder(path);
  const auto line = [](const char* what, const std::string& value) { fmt::print("{:<24} {}\n", what, value); };
  line("nvme path", fmt::format("{}, {}, {} of {} free", folder.path, folder.file_system,
                                format_bytes(folder.free_bytes), format_bytes(folder.total_bytes)));
  for (const std::string& warning : folder_warnings(folder)) {
    fmt::print("{:<24} -> {}\n", "", warning);
  }
  HostMemory memory;
  DiskRateOptions options{.file_nbytes = std::size_t{256} << 20, .seconds = 1};
  DiskRateProbe probe(memory, {path}, options);
  const double mixed = probe.measure(DiskTraffic::kMixed);
  line("  read", fmt::format("{:.2f} GB/s ({})", probe.measure(DiskTraffic::kRead) / 1e9, probe.engine_name()));
  line("  write", fmt::format("{:.2f} GB/s", probe.measure(DiskTraffic::kWrite) / 1e9));
  line("  both together", fmt::format("{:.2f} GB/s", mixed / 1e9));
  line("  wear", fmt::format("up to {:.1f} TB written a day at that pace; 12 bytes a parameter and step",
                             mixed / 2 * kSecondsPerDay / 1e12));
  for (const std::string& note : probe.engine().notes()) {
    fmt::print("{:<24} -> {}\n", "", note);
  }
}

void run(const std::string& nvme_path) {
  const HostInfo host = probe_host();
  for (const auto& line : report(host)) {
    fmt::print("{:<24} {}\n", line.name, line.value);
    if (!line.advice.empty()) {
      fmt::print("{:<24} -> {}\n", "", line.advice);
    }
  }
  fmt::print("{:<24} {}\n", "update kernels", fmt::format("{}", kernels::available_targets().front()));
  ThreadTeam team(host.usable_cores);
  fmt::print("{:<24} {:.1f} GB/s, {} threads\n", "memory copy", probe_copy_bandwidth(team.parallel_for()) / 1e9,
             host.usable_cores);
  if (!nvme_path.empty()) {
    look_at_disk(nvme_path);
  }
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto* command = app.add_subcommand("doctor", "Say what this machine can do, and what will hinder training");
  auto nvme_path = std::make_shared<std::string>();
  command->add_option("--nvme", *nvme_path, "A folder on the disk that states would rest on: also how fast it is");
  command->callback([nvme_path] { run(*nvme_path); });
}

}  // namespace pannier::cli
