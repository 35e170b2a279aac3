#include "pannier/hardware/rates.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/hash.h"
#include "pannier/hardware/copy_bandwidth.h"
#include "pannier/hardware/core_use.h"
#include "pannier/hardware/host_info.h"

namespace pannier {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "pannier-hardware";
// Raised when the meaning of a rate or the way it is measured changes.
constexpr int kVersion = 3;
constexpr std::uintmax_t kMostFileBytes = 64 << 10;
// No machine does more: such a number was not measured.
constexpr double kMostRate = 1e16;
// Copies of less than this measure caches, not memory.
constexpr std::size_t kLeastCopyBytes = std::size_t{8} << 20;
// Of the time: what remains after the copy probe is shared between the host's update and the links.
constexpr double kUpdateShare = 0.4;
// Of the time: what each probe gets even where the machine was so slow that nothing is left. No time measures nothing.
constexpr double kLeastShare = 0.1;
// Of the cores that this process may use: where others left less, the rates are not those of the machine.
constexpr double kQuiet = 0.85;
// Rates of a busy machine count for as long: for the processes that started together.
constexpr std::chrono::seconds kBusyRatesAge{60};
// Another process measures for seconds; one that takes longer is not waited for.
constexpr std::chrono::seconds kMostWait{10};

constexpr std::array<std::pair<const char*, double LinkAndHostRates::*>, 7> kFields{
    {{"up", &LinkAndHostRates::up},
     {"down", &LinkAndHostRates::down},
     {"up_both", &LinkAndHostRates::up_both},
     {"down_both", &LinkAndHostRates::down_both},
     {"dram", &LinkAndHostRates::dram},
     {"host_update", &LinkAndHostRates::host_update},
     {"device_copy", &LinkAndHostRates::device_copy}}};

bool is_rate(double value) { return std::isfinite(value) && value >= 0.0 && value <= kMostRate; }
double rate_or_unknown(double value) { return is_rate(value) ? value : 0.0; }

double probe_dram(const RateProbes& probes) {
  const std::size_t least = std::min(kLeastCopyBytes, probes.copy_nbytes);
  for (std::size_t nbytes = probes.copy_nbytes; nbytes >= least; nbytes /= 2) {
    try {
      return probe_copy_bandwidth(probes.parallel_for, nbytes);
    } catch (const OutOfMemoryError&) {
      continue;  // Less memory gives a rate too, if a less certain one.
    } catch (const std::bad_alloc&) {
      continue;
    }
  }
  return 0.0;
}

Json identity_json(const MachineIdentity& machine) {
  return {{"cpu_model", machine.cpu_model}, {"num_cores", machine.num_cores}, {"devices", machine.device_names}};
}

// Names come from the kernel and from drivers: bytes that are not UTF-8 are replaced, not an error.
std::string to_text(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::optional<std::string> read_small_file(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || fs::file_size(path, error) > kMostFileBytes || error) {
    return std::nullopt;
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return file.bad() ? std::nullopt : std::optional(std::move(text));
}

bool answers(const LinkAndHostRates& rates, const RateProbes& probes) {
  return rates.dram > 0.0 && (!probes.host_update || rates.host_update > 0.0) &&
         (!probes.links || (rates.up > 0.0 && rates.down > 0.0));
}

// Holds a folder against other processes that do so, for as long as this lives. Where it can't be had, work goes on.
class HeldFolder {
 public:
  explicit HeldFolder(const fs::path& folder)
      : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    const auto end = std::chrono::steady_clock::now() + kMostWait;
    while (descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  ~HeldFolder() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
  }
  HeldFolder(const HeldFolder&) = delete;
  HeldFolder& operator=(const HeldFolder&) = delete;

 private:
  int descriptor_;
};

bool is_recent(const fs::path& path) {
  std::error_code error;
  const auto time = fs::last_write_time(path, error);
  const auto age = fs::file_time_type::clock::now() - time;
  return !error && age >= age.zero() && age < kBusyRatesAge;
}

std::optional<LinkAndHostRates> read_rates(const fs::path& path, const MachineIdentity& machine) {
  const auto text = read_small_file(path);
  const Json json = text ? Json::parse(*text, nullptr, false) : Json();
  if (!json.is_object() || json.value("format", Json()) != kFormat || json.value("version", Json()) != kVersion ||
      to_text(json.value("machine", Json()), -1) != to_text(identity_json(machine), -1)) {
    return std::nullopt;
  }
  if (json.value("quiet", Json()) != true && !is_recent(path)) {
    return std::nullopt;
  }
  const Json stored = json.value("rates", Json());
  LinkAndHostRates rates;
  for (const auto& [name, field] : kFields) {
    const Json value = stored.is_object() ? stored.value(name, Json()) : Json();
    if (!value.is_number() || !is_rate(value.get<double>())) {
      return std::nullopt;
    }
    rates.*field = value.get<double>();
  }
  return rates;
}

// Writes beside the file and renames, so that a reader sees the old file or the new one whole.
void write_rates(const fs::path& path, const MachineIdentity& machine, const LinkAndHostRates& rates, bool quiet) {
  Json values = Json::object();
  for (const auto& [name, field] : kFields) {
    values[name] = rates.*field;
  }
  const Json file_json = {{"format", kFormat},
                          {"version", kVersion},
                          {"machine", identity_json(machine)},
                          {"quiet", quiet},
                          {"rates", values}};
  const std::string text = to_text(file_json, 2) + "\n";
  std::string name = path.string() + ".XXXXXX";
  const int descriptor = ::mkstemp(name.data());
  if (descriptor < 0) {
    return;
  }
  std::FILE* file = ::fdopen(descriptor, "wb");
  if (file == nullptr) {
    ::close(descriptor);
    ::unlink(name.c_str());
    return;
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || std::rename(name.c_str(), path.c_str()) != 0) {
    ::unlink(name.c_str());
  }
}

}  // namespace

MachineIdentity identify_machine(std::vector<std::string> device_names, const fs::path& root) {
  const HostInfo host = probe_host(root);
  return {.cpu_model = host.cpu_model, .num_cores = host.usable_cores, .device_names = std::move(device_names)};
}

LinkAndHostRates probe_rates(const RateProbes& probes) {
  const auto begin = std::chrono::steady_clock::now();
  const auto share_of_the_rest = [&](double share) {
    const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::max(kLeastShare * probes.most_seconds, share * (probes.most_seconds - spent));
  };
  LinkAndHostRates rates;
  rates.dram = rate_or_unknown(probe_dram(probes));
  if (probes.host_update) {
    rates.host_update = rate_or_unknown(probes.host_update(share_of_the_rest(probes.links ? kUpdateShare : 1.0)));
  }
  if (rates.dram > 0.0) {
    // A copy may be slower than what memory gives: an update that was seen to move more bytes has shown it.
    rates.dram = std::max(rates.dram, rate_or_unknown(rates.host_update * kRatedUpdateNbytes));
  }
  if (probes.links) {
    const LinkRates links = probes.links(share_of_the_rest(1.0));
    rates.up = rate_or_unknown(links.up);
    rates.down = rate_or_unknown(links.down);
    rates.up_both = rate_or_unknown(links.up_both);
    rates.down_both = rate_or_unknown(links.down_both);
    rates.device_copy = rate_or_unknown(links.device_copy);
  }
  return rates;
}

fs::path rates_cache_folder() {
  for (const auto& [name, below] : {std::pair("XDG_CACHE_HOME", "pannier"), std::pair("HOME", ".cache/pannier")}) {
    const char* value = std::getenv(name);
    if (value != nullptr && fs::path(value).is_absolute()) {
      return fs::path(value) / below;
    }
  }
  return {};
}

fs::path rates_cache_file(const fs::path& folder, const MachineIdentity& machine) {
  return folder / fmt::format("hardware-{:016x}.json", fnv1a(to_text(identity_json(machine), -1)));
}

MeasuredRates cached_rates(const fs::path& folder, const MachineIdentity& machine, const RateProbes& probes) {
  if (folder.empty()) {
    return {probe_rates(probes), RateOrigin::kProbe};
  }
  const fs::path path = rates_cache_file(folder, machine);
  const auto read = [&] {
    const auto rates = read_rates(path, machine);
    return rates && answers(*rates, probes) ? rates : std::nullopt;
  };
  if (const auto rates = read()) {
    return {*rates, RateOrigin::kCache};
  }
  std::error_code error;
  fs::create_directories(folder, error);
  const HeldFolder held(folder);
  if (const auto rates = read()) {  // Another process measured meanwhile.
    return {*rates, RateOrigin::kCache};
  }
  const CoreUse use(probes.root);
  const LinkAndHostRates rates = probe_rates(probes);
  write_rates(path, machine, rates, use.cores_left() >= kQuiet * std::min(machine.num_cores, use.num_cores()));
  return {rates, RateOrigin::kProbe};
}

}  // namespace pannier
