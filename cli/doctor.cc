// pannier doctor: what this machine can do, and what will hinder training.
#include <fmt/format.h>

#include <thread>

#include "cli/commands.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/copy_bandwidth.h"
#include "pannier/hardware/host_info.h"
#include "pannier/hardware/host_report.h"
#include "pannier/kernels/update.h"

namespace pannier::cli {
namespace {

void run() {
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
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto* command = app.add_subcommand("doctor", "Say what this machine can do, and what will hinder training");
  command->callback(run);
}

}  // namespace pannier::cli
