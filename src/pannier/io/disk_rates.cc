#include "pannier/io/disk_rates.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Enough transfers that the disk's queue stays full while one of them is waited for and pushed anew.
std::size_t num_requests(const DiskRateOptions& options) {
  const std::size_t in_flight = static_cast<std::size_t>(options.engine.depth) * options.engine.piece_nbytes;
  return std::max<std::size_t>(4, 2 * in_flight / options.request_nbytes);
}

const DiskRateOptions& validated(const DiskRateOptions& options) {
  options.validate();
  return options;
}

}  // namespace

void DiskRateOptions::validate() const {
  engine.validate();
  if (request_nbytes == 0 || request_nbytes % kIoAlignment != 0 || file_nbytes < 2 * request_nbytes ||
      file_nbytes % (2 * request_nbytes) != 0) {
    throw ConfigError(fmt::format("a file of {} bytes is no even number of requests of {}, multiples of {}",
                                  file_nbytes, request_nbytes, kIoAlignment));
  }
  if (!(seconds > 0)) {
    throw ConfigError(fmt::format("seconds must be positive, got {}", seconds));
  }
}

DiskRateProbe::DiskRateProbe(HostMemory& memory, const std::vector<std::string>& folders,
                             const DiskRateOptions& options)
    : options_(validated(options)),
      file_({.folders = folders, .nbytes = options.file_nbytes}),
      memory_(memory, num_requests(options) * options.request_nbytes, {.owner = "disk bench"}) {
  // Bytes that a disk can't compress away.
  std::uint64_t state = 0x9E3779B97F4A7C15U;
  for (auto& word : memory_.as<std::uint64_t>()) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    word = state;
  }
  for (std::size_t i = 0; i < num_requests(options); ++i) {
    options_.engine.buffers.push_back(memory_.data().subspan(i * options.request_nbytes, options.request_nbytes));
  }
  engine_ = make_io_engine(file_, options_.engine);
  run(DiskTraffic::kWrite, [&](std::size_t moved, double) { return moved >= options_.file_nbytes; });
}

double DiskRateProbe::run(DiskTraffic traffic, const std::function<bool(std::size_t, double)>& is_enough) {
  const std::size_t half = options_.file_nbytes / 2;
  std::vector<IoTransferPtr> transfers(options_.engine.buffers.size());
  std::size_t read_at = 0;
  std::size_t write_at = traffic == DiskTraffic::kMixed ? half : 0;
  std::size_t moved = 0;
  std::size_t pushed = 0;
  const auto start = Clock::now();
  for (std::size_t i = 0;; i = (i + 1) % transfers.size()) {
    if (transfers[i] != nullptr) {
      transfers[i]->wait_done();
      moved += options_.request_nbytes;
      if (is_enough(moved, seconds_since(start))) {
        break;
      }
    }
    const bool is_write = traffic == DiskTraffic::kWrite || (traffic == DiskTraffic::kMixed && pushed++ % 2 == 1);
    auto& at = is_write ? write_at : read_at;
    const auto buffer = options_.engine.buffers[i];
    transfers[i] = is_write ? engine_->write(at, buffer) : engine_->read(at, buffer);
    at = (at + options_.request_nbytes) % options_.file_nbytes;
  }
  const double rate = static_cast<double>(moved) / seconds_since(start);
  for (const auto& transfer : transfers) {
    if (transfer != nullptr) {
      transfer->wait_done();
    }
  }
  return rate;
}

double DiskRateProbe::measure(DiskTraffic traffic) {
  return run(traffic, [this](std::size_t, double elapsed) { return elapsed >= options_.seconds; });
}

}  // namespace pannier
