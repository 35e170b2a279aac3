// pannier bench: the update's rate on this machine, as a share of its memory copy rate.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "cli/commands.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/copy_bandwidth.h"
#include "pannier/hardware/host_info.h"
#include "pannier/kernels/update.h"
#include "pannier/mem/host_slab.h"

namespace pannier::cli {
namespace {

/// Bytes that one AdamW update of a bf16 parameter moves: gradient 2; parameter, rest and two moments read and written.
constexpr double kBytesPerParameter = 26;

void bench_update(std::int64_t numel, int repeats) {
  const HostInfo host = probe_host();
  ThreadTeam team(host.usable_cores);
  const ParallelFor parallel = team.parallel_for();
  HostMemory memory;
  const auto count = static_cast<std::size_t>(numel);
  HostSlab slab(memory, count * 14, {.owner = "bench"}, parallel);
  std::byte* base = slab.data().data();
  kernels::Hyperparameters hyper;
  const kernels::UpdateBuffers buffers{.param = base,
                                       .rest = base + 2 * count,
                                       .state1 = reinterpret_cast<float*>(base + 4 * count),
                                       .state2 = reinterpret_cast<float*>(base + 8 * count),
                                       .grad = base + 12 * count,
                                       .grad_type = kernels::GradType::kBf16,
                                       .numel = numel};
  std::vector<double> shares;
  std::vector<double> rates;
  for (int i = 0; i < repeats; ++i) {
    const double copy = probe_copy_bandwidth(parallel);
    const auto coefficients = kernels::make_coefficients(kernels::Algorithm::kAdamW, hyper, i + 1, 0.5F);
    const auto start = std::chrono::steady_clock::now();
    kernels::update_all(kernels::Algorithm::kAdamW, kernels::StateFormat::kBf16, {{coefficients, buffers}}, parallel);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rates.push_back(static_cast<double>(numel) / seconds);
    shares.push_back(rates.back() * kBytesPerParameter / copy);
  }
  std::sort(rates.begin(), rates.end());
  std::sort(shares.begin(), shares.end());
  const std::size_t middle = rates.size() / 2;
  fmt::print(
      "update adamw bf16: {:.3f} G parameters/s, {:.1f} GB/s, {:.0f} % of this machine's copy rate ({} threads, {})\n",
      rates[middle] / 1e9, rates[middle] * kBytesPerParameter / 1e9, 100 * shares[middle], host.usable_cores,
      kernels::available_targets().front());
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "Measure the update as a share of the memory's copy rate");
  command->footer("Example:\n  pannier bench --parameters 67108864");
  auto numel = std::make_shared<std::int64_t>(std::int64_t{32} << 20);
  auto repeats = std::make_shared<int>(7);
  command->add_option("--parameters", *numel, "Parameters to update")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--repeats", *repeats, "Repetitions; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([numel, repeats] { bench_update((*numel + 63) / 64 * 64, *repeats); });
}

}  // namespace pannier::cli
