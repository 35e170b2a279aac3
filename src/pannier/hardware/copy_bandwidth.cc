#include "pannier/hardware/copy_bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>

#include "pannier/base/error.h"
#include "pannier/hardware/host_info.h"

namespace pannier {
namespace {

constexpr std::int64_t kGrainBytes = std::int64_t{1} << 20;
constexpr double kMeasuredSeconds = 0.1;
constexpr int kMostPasses = 16;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double probe_copy_bandwidth(const ParallelFor& parallel_for, std::size_t nbytes) {
  if (nbytes == 0) {
    throw ConfigError("a copy of no bytes has no bandwidth");
  }
  const auto available = host_bytes_available(probe_memory());
  if (nbytes > available / 2) {
    throw OutOfMemoryError("host", "bandwidth probe", nbytes > SIZE_MAX / 2 ? SIZE_MAX : 2 * nbytes, available);
  }
  const auto source = std::make_unique_for_overwrite<std::byte[]>(nbytes);
  const auto target = std::make_unique_for_overwrite<std::byte[]>(nbytes);
  const auto each = [&](const std::function<void(std::size_t, std::size_t)>& body) {
    parallel_for(static_cast<std::int64_t>(nbytes), kGrainBytes, [&](std::int64_t begin, std::int64_t end) {
      body(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
    });
  };
  // Touch both first: page faults are not bandwidth, and a page that was never written reads from cache.
  each([&](std::size_t begin, std::size_t count) {
    std::memset(source.get() + begin, 1, count);
    std::memset(target.get() + begin, 0, count);
  });
  double best = 0.0;
  double spent = 0.0;
  for (int pass = 0; pass < kMostPasses && (pass == 0 || spent < kMeasuredSeconds); ++pass) {
    const double seconds = seconds_of([&] {
      each([&](std::size_t begin, std::size_t count) {
        std::memcpy(target.get() + begin, source.get() + begin, count);
      });
    });
    spent += seconds;
    best = std::max(best, 2.0 * static_cast<double>(nbytes) / std::max(seconds, 1e-9));
  }
  PANNIER_CHECK(target[nbytes - 1] == std::byte{1}, "the copied bytes did not arrive");
  return best;
}

}  // namespace pannier
