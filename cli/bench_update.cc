// pannier bench update: the update's rate on this machine, with its arrays laid out as the engine does, as a share of
// the rate at which the fastest of several kernels copies memory.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "cli/bench.h"
#include "pannier/base/thread_team.h"
#include "pannier/hardware/copy_bandwidth.h"
#include "pannier/hardware/host_info.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/state_shape.h"
#include "pannier/mem/host_slab.h"

namespace pannier::cli {
namespace {

/// Bytes that one AdamW update of a bf16 parameter moves: gradient 2; parameter, rest and two moments read and written.
constexpr double kBytesPerParameter = 26;
/// Small enough for any machine, and above most caches.
constexpr std::size_t kLeastCopyNbytes = std::size_t{64} << 20;

void bench_update(std::int64_t numel, int repeats) {
  const HostInfo host = probe_host();
  ThreadTeam team(host.usable_cores);
  const ParallelFor parallel = team.parallel_for();
  HostMemory memory;
  constexpr StateShape kExactBf16{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};
  const HostBucketLayout layout = host_bucket_layout(kExactBf16, numel);
  HostSlab slab(memory, layout.nbytes + nbytes_of(numel, 2), {.owner = "bench"}, parallel);
  std::byte* base = slab.data().data();
  const auto [state1, state2, rest, param] = layout.offsets;
  const kernels::UpdateBuffers buffers{.param = base + param,
                                       .rest = base + rest,
                                       .state1 = reinterpret_cast<float*>(base + state1),
                                       .state2 = reinterpret_cast<float*>(base + state2),
                                       .grad = base + layout.nbytes,
                                       .grad_type = kernels::GradType::kBf16,
                                       .numel = numel};
  // The copy moves as many bytes as the update, so that caches help both alike, and each update is compared with the
  // copies just before it, so that a machine that others use too is measured in the same state.
  const std::size_t copy_nbytes = std::max(nbytes_of(numel, 8), kLeastCopyNbytes);
  std::vector<double> rates;
  std::vector<double> copies;
  std::vector<double> shares;
  for (int i = 0; i < repeats; ++i) {
    copies.push_back(probe_copy_bandwidth(parallel, copy_nbytes));
    const auto coefficients = kernels::make_coefficients(kernels::Algorithm::kAdamW, {}, i + 1, 0.5F);
    const auto start = std::chrono::steady_clock::now();
    kernels::update_all(kernels::Algorithm::kAdamW, kernels::StateFormat::kBf16, {{coefficients, buffers}}, parallel);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rates.push_back(static_cast<double>(numel) / seconds);
    shares.push_back(rates.back() * kBytesPerParameter / copies.back());
  }
  const double rate = median(rates);
  fmt::print(
      "update adamw bf16: {:.3f} G parameters/s, {:.1f} GB/s, {:.0f} % of this machine's copy rate of {:.1f} GB/s ({} "
      "threads, {})\n",
      rate / 1e9, rate * kBytesPerParameter / 1e9, 100 * median(shares), median(copies) / 1e9, host.usable_cores,
      kernels::available_targets().front());
}

}  // namespace

void add_bench_update(CLI::App& bench) {
  auto* command = bench.add_subcommand("update", "The host's update, as a share of the memory's copy rate");
  command->footer("Example:\n  pannier bench update --parameters 67108864");
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
