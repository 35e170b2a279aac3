#include "pannier/plan/plan_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// "1.54 G" of 1,540,000,000.
std::string format_count(double count) {
  for (const auto& [name, unit] : {std::pair("G", 1e9), std::pair("M", 1e6), std::pair("k", 1e3)}) {
    if (count >= unit) {
      return fmt::format("{:.2f} {}", count / unit, name);
    }
  }
  return fmt::format("{:.0f}", count);
}

std::string format_rate(double rate, const char* unit) {
  return rate > 0.0 ? fmt::format("{:.1f} {}", rate / 1e9, unit) : "-";
}

std::string seconds_line(const char* name, double seconds) {
  return fmt::format("{:<18} {:>10.3f} s\n", name, seconds);
}

}  // namespace

std::string format_routes(const PlanTable& table) {
  PANNIER_CHECK(table.routes.size() == table.bucket_numels.size(),
                fmt::format("{} routes for {} buckets", table.routes.size(), table.bucket_numels.size()));
  std::array<std::int64_t, 3> buckets{};
  std::array<double, 3> numels{};
  double total = 0.0;
  for (std::size_t i = 0; i < table.routes.size(); ++i) {
    const auto route = static_cast<std::size_t>(table.routes[i]);
    ++buckets.at(route);
    numels.at(route) += static_cast<double>(table.bucket_numels[i]);
    total += static_cast<double>(table.bucket_numels[i]);
  }
  std::string text = fmt::format("{:<18} {:>10} {:>12} {:>8}\n", "update path", "buckets", "parameters", "share");
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    text += fmt::format("{:<18} {:>10} {:>12} {:>6.1f} %\n", to_string(static_cast<UpdateRoute>(i)), buckets.at(i),
                        format_count(numels.at(i)), total > 0.0 ? 100.0 * numels.at(i) / total : 0.0);
  }
  return text;
}

std::string format_times(const PlanTable& table) {
  std::string text = "predicted step\n";
  const StepObservation& seen = table.observation;
  if (!seen.forward_s || !seen.backward_s) {
    text += "times come after the first steps; until then the split counts nothing as hidden\n";
    return text;
  }
  const std::string each = table.micro_batches > 1 ? fmt::format(" (each of {})", table.micro_batches) : "";
  text += seconds_line(("forward" + each).c_str(), *seen.forward_s);
  text += seconds_line(("backward" + each).c_str(), *seen.backward_s);
  const double exposed_s = table.split ? table.split->exposed_s : 0.0;
  text += seconds_line("exposed", exposed_s);
  text +=
      seconds_line("step", static_cast<double>(table.micro_batches) * (*seen.forward_s + *seen.backward_s) + exposed_s);
  if (table.split) {
    text += fmt::format("{:<18} {:>12}\n{:<18} {:>12} {:>12}\n", "binds", table.split->binds, "resource", "needed",
                        "window");
    const SplitTimes& times = table.split->times;
    for (const auto& [name, time] :
         {std::pair("link up", times.link_up), std::pair("link down", times.link_down), std::pair("DRAM", times.dram),
          std::pair("cores", times.cores), std::pair("update on device", times.device_update)}) {
      text += fmt::format("{:<18} {:>10.3f} s {:>10.3f} s\n", name, time.needed_s, time.window_s);
    }
  }
  return text;
}

std::string format_rates(const LinkAndHostRates& rates, const RateOrigins& origins) {
  std::string text = fmt::format("{:<18} {:>14}  {}\n", "hardware", "rate", "from");
  const auto line = [&text](const char* name, double rate, const char* unit, RateOrigin origin) {
    text += fmt::format("{:<18} {:>14}  {}\n", name, format_rate(rate, unit),
                        to_string(rate > 0.0 ? origin : RateOrigin::kUnknown));
  };
  line("link up", rates.up, "GB/s", origins.link);
  line("link down", rates.down, "GB/s", origins.link);
  if (rates.up_both > 0.0 && rates.down_both > 0.0) {
    line("both ways, up", rates.up_both, "GB/s", origins.link);
    line("both ways, down", rates.down_both, "GB/s", origins.link);
  }
  line("DRAM", rates.dram, "GB/s", origins.dram);
  line("update on host", rates.host_update, "G/s", origins.host_update);
  line("device memory", rates.device_copy, "GB/s", origins.device_copy);
  return text;
}

std::string format_plan_table(const PlanTable& table) {
  std::string text = format_plan(table.memory, table.optimizer_home, table.activations_nbytes);
  if (!table.routes.empty()) {
    text += "\n" + format_routes(table);
  }
  text += "\n" + format_times(table);
  if (table.optimizer_home != Home::kDevice) {
    text += "\n" + format_rates(table.rates, table.origins);
  }
  return text;
}

}  // namespace pannier
