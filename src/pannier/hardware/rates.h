// The rates that the planner works with, measured once a machine in at most two seconds and kept in a file.
//
// This floor measures host memory by itself; the host's update and the links are measured by callbacks, because the
// kernels and the device live on floors that it may not see.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "pannier/base/parallel.h"
#include "pannier/plan/link_and_host_rates.h"

namespace pannier {

/// What rates belong to. A change of any of it measures anew.
struct MachineIdentity {
  std::string cpu_model;
  int num_cores = 1;                      ///< That this process may use.
  std::vector<std::string> device_names;  ///< GPUs, in order; empty without.
};

/// The machine as probe_host sees it, with the GPUs that the caller sees.
[[nodiscard]] MachineIdentity identify_machine(std::vector<std::string> device_names,
                                               const std::filesystem::path& root = "/");

/// Copy rates of a device and its link, in bytes per second; 0: not measured.
struct LinkRates {
  double up = 0.0;
  double down = 0.0;
  double up_both = 0.0;
  double down_both = 0.0;
  double device_copy = 0.0;
};

/// How to measure. A callback is told how many seconds it may take; an empty one leaves its rates unknown.
struct RateProbes {
  ParallelFor parallel_for = serial_for;
  std::function<double(double most_seconds)> host_update{};  ///< Parameters per second with all cores.
  std::function<LinkRates(double most_seconds)> links{};     ///< Of the device that this process trains on.
  double most_seconds = 2.0;                                 ///< For all together.
  std::size_t copy_nbytes = std::size_t{128} << 20;          ///< Of each of two buffers; less where memory is short.
  std::filesystem::path root = "/";                          ///< Of /proc, which says how busy others are.
};

/// Measures now. Host memory that does not suffice for the copy leaves `dram` unknown; exceptions of a callback come
/// out.
[[nodiscard]] LinkAndHostRates probe_rates(const RateProbes& probes);

/// Rates and where they come from.
struct MeasuredRates {
  LinkAndHostRates rates;
  RateOrigin origin = RateOrigin::kUnknown;
};

/// The user's cache folder, by the XDG rules: $XDG_CACHE_HOME, or $HOME/.cache, and /pannier below it. Empty when
/// neither names an absolute path; then nothing is kept.
[[nodiscard]] std::filesystem::path rates_cache_folder();

/// The file of this machine in `folder`: hardware-<key>.json.
[[nodiscard]] std::filesystem::path rates_cache_file(const std::filesystem::path& folder,
                                                     const MachineIdentity& machine);

/// Reads this machine's rates from `folder`, or measures them and writes them there. A file that is damaged, older, of
/// another machine, or without a rate that `probes` could measure, is measured anew; a folder that cannot be written
/// is no error. Of several processes, such as the ranks of a node, one measures, and the others wait for it. Rates that
/// were measured while other processes kept the cores busy count for those and are measured anew at a later start.
[[nodiscard]] MeasuredRates cached_rates(const std::filesystem::path& folder, const MachineIdentity& machine,
                                         const RateProbes& probes);

}  // namespace pannier
