#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/commands.h"

namespace pannier::cli {

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::string percent_of(double part, double whole) { return fmt::format("{:.0f} %", 100 * part / whole); }

void add_bench(CLI::App& app) {
  auto* command = app.add_subcommand(
      "bench", "Measure transfers, a disk, the update or whole steps, as shares of the machine's rates");
  command->footer(
      "Examples:\n  pannier bench link\n  pannier bench update --parameters 67108864\n  pannier bench step --layers 2");
  command->require_subcommand(1);
  add_bench_link(*command);
  add_bench_nvme(*command);
  add_bench_update(*command);
  add_bench_step(*command);
}

}  // namespace pannier::cli
