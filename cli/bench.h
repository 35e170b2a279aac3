// The parts of `pannier bench`: each measures something and compares it with what the machine can do.
#pragma once

#include <CLI/CLI.hpp>
#include <vector>

namespace pannier::cli {

void add_bench_link(CLI::App& bench);
void add_bench_nvme(CLI::App& bench);
void add_bench_step(CLI::App& bench);
void add_bench_update(CLI::App& bench);

/// The middle one; of an even number, the greater of the two. `values` must not be empty.
[[nodiscard]] double median(std::vector<double> values);

/// "98 %"; `whole` must not be 0.
[[nodiscard]] std::string percent_of(double part, double whole);

}  // namespace pannier::cli
