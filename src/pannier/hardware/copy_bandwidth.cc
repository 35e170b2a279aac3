#include "pannier/hardware/copy_bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "pannier/base/error.h"
#include "pannier/hardware/copy_kernels.h"
#include "pannier/hardware/host_info.h"

namespace pannier {
namespace {

constexpr std::int64_t kGrainBytes = std::int64_t{1} << 20;
constexpr double kMeasuredSeconds = 0.2;
constexpr int kLeastPasses = 2;
constexpr int kMostPasses = 16;
constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;
/// Streams whose distance is a multiple of 128 MiB fall on the same DRAM banks, so the second buffer begins later.
constexpr std::size_t kSetApartNbytes = std::size_t{64} << 10;

/// Memory in huge pages where there are any, from `offset` into them on.
class Buffer {
 public:
  Buffer(std::size_t nbytes, std::size_t offset)
      : mapped_nbytes_((nbytes + offset + kHugePageNbytes - 1) / kHugePageNbytes * kHugePageNbytes),
        bytes_(static_cast<std::byte*>(::operator new(mapped_nbytes_, std::align_val_t{kHugePageNbytes}))),
        offset_(offset) {
    madvise(bytes_.get(), mapped_nbytes_, MADV_HUGEPAGE);
  }
  [[nodiscard]] std::byte* data() const noexcept { return bytes_.get() + offset_; }

 private:
  struct Delete {
    void operator()(std::byte* bytes) const noexcept { ::operator delete(bytes, std::align_val_t{kHugePageNbytes}); }
  };
  std::size_t mapped_nbytes_;
  std::unique_ptr<std::byte, Delete> bytes_;
  std::size_t offset_;
};

/// Copies any number of bytes: the kernel what it can, memcpy the rest.
void copy_all(const CopyKernel& kernel, std::byte* to, const std::byte* from, std::size_t nbytes) {
  const std::size_t whole = nbytes / kCopyAlignment * kCopyAlignment;
  kernel.copy(to, from, whole);
  std::memcpy(to + whole, from + whole, nbytes - whole);
}

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
  const Buffer source(nbytes, 0);
  const Buffer target(nbytes, kSetApartNbytes);
  const auto each = [&](const std::function<void(std::size_t, std::size_t)>& body) {
    constexpr auto kBlock = static_cast<std::int64_t>(kCopyAlignment);
    const std::int64_t blocks = (static_cast<std::int64_t>(nbytes) + kBlock - 1) / kBlock;
    parallel_for(blocks, kGrainBytes / kBlock, [&](std::int64_t begin, std::int64_t end) {
      const auto first = static_cast<std::size_t>(begin * kBlock);
      body(first, std::min(static_cast<std::size_t>(end * kBlock), nbytes) - first);
    });
  };
  // Touch both first: page faults are not bandwidth, and a page that was never written reads from cache.
  each([&](std::size_t begin, std::size_t count) {
    std::memset(source.data() + begin, 1, count);
    std::memset(target.data() + begin, 0, count);
  });
  double best = 0.0;
  double spent = 0.0;
  for (int pass = 0; pass < kMostPasses && (pass < kLeastPasses || spent < kMeasuredSeconds); ++pass) {
    for (const CopyKernel& kernel : available_copy_kernels()) {
      const double seconds = seconds_of([&] {
        each([&](std::size_t begin, std::size_t count) {
          copy_all(kernel, target.data() + begin, source.data() + begin, count);
        });
      });
      spent += seconds;
      best = std::max(best, 2.0 * static_cast<double>(nbytes) / std::max(seconds, 1e-9));
    }
  }
  PANNIER_CHECK(target.data()[nbytes - 1] == std::byte{1}, "the copied bytes did not arrive");
  return best;
}

}  // namespace pannier
