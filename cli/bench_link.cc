// pannier bench link: how fast the engine's movers carry bytes between host and device, each way alone and both at
// once, as shares of what the probe found when this machine was first seen.
#include <ATen/Context.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>

#include "cli/bench.h"
#include "pannier/base/units.h"
#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/engine/config.h"
#include "pannier/engine/engine.h"
#include "pannier/engine/route_planner.h"
#include "pannier/mem/host_slab.h"

namespace pannier::cli {
namespace {

/// One direction: a mover, and the memory at its two ends.
class Way {
 public:
  Way(Device& device, Queue queue, std::span<std::byte> host)
      : queue_(queue),
        host_(host),
        on_device_(device.allocate(static_cast<std::int64_t>(host.size()), at::kByte, Owner::kStreamedStates)),
        mover_(device, queue, {}) {}
  TransferPtr start() {
    void* const device = on_device_.data_ptr();
    return queue_ == Queue::kUp ? mover_.push({{device, host_.data(), host_.size()}}, {})
                                : mover_.push({{host_.data(), device, host_.size()}}, {});
  }

 private:
  Queue queue_;
  std::span<std::byte> host_;
  at::Tensor on_device_;
  Mover mover_;
};

// Bytes per second of each way that is given.
double rate_of(std::size_t nbytes, std::initializer_list<Way*> ways, int repeats) {
  std::vector<double> rates;
  for (int i = 0; i <= repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<TransferPtr> transfers;
    for (Way* way : ways) {
      transfers.push_back(way->start());
    }
    for (const TransferPtr& transfer : transfers) {
      transfer->wait_done();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (i > 0) {  // The first warms up.
      rates.push_back(static_cast<double>(nbytes) / seconds);
    }
  }
  return median(rates);
}

void print(const char* what, double rate, double probed) {
  const std::string share =
      probed > 0 ? fmt::format(", {} of the probe's {:.1f} GB/s", percent_of(rate, probed), probed / 1e9) : "";
  fmt::print("{:<24}{:>7.1f} GB/s{}\n", what, rate / 1e9, share);
}

void bench_link(std::size_t nbytes, int repeats) {
  const c10::Device place = training_device(Config{});
  const auto device = make_device(place);
  const LinkAndHostRates probed = machine_rates(*device).rates;
  HostMemory memory;
  const ParallelFor parallel = torch_parallel_for();
  HostSlab up_slab(memory, nbytes, {.owner = "bench"}, parallel);
  HostSlab down_slab(memory, nbytes, {.owner = "bench"}, parallel);
  std::string reason;
  const auto up_pin = device->register_host(up_slab.data(), reason);
  const auto down_pin = device->register_host(down_slab.data(), reason);
  Way up(*device, Queue::kUp, up_slab.data());
  Way down(*device, Queue::kDown, down_slab.data());
  fmt::print("{} a way, {}{}\n", format_bytes(nbytes), device->name(),
             reason.empty() ? "" : fmt::format(" (host memory not registered: {})", reason));
  print("host to device", rate_of(nbytes, {&up}, repeats), probed.up);
  print("device to host", rate_of(nbytes, {&down}, repeats), probed.down);
  print("each way, both at once", rate_of(nbytes, {&up, &down}, repeats), std::min(probed.up_both, probed.down_both));
  if (place.is_cpu()) {
    fmt::print(
        "Without a GPU both ends are this machine's memory, one thread a way; there is no link to compare with.\n");
  }
}

}  // namespace

void add_bench_link(CLI::App& bench) {
  auto* command = bench.add_subcommand("link", "Transfers between host and device, as shares of the probe's rates");
  command->footer("Example:\n  pannier bench link --mebibytes 4096");
  auto mebibytes = std::make_shared<std::size_t>(1024);
  auto repeats = std::make_shared<int>(7);
  command->add_option("--mebibytes", *mebibytes, "To carry each way, at once")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--repeats", *repeats, "Repetitions; the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([mebibytes, repeats] { bench_link(*mebibytes << 20, *repeats); });
}

}  // namespace pannier::cli
