#include "pannier/device/cuda/link_probe.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "pannier/kernels/cuda/cuda_error.h"

namespace pannier {
namespace {

using kernels::cuda::check_cuda;

constexpr std::size_t kNbytes = std::size_t{64} << 20;

/// Two buffers on each side, freed at the end. Plain allocations, since torch's would count for the user's peak.
struct Buffers {
  Buffers() {
    for (int i = 0; i < 2; ++i) {
      complete = complete && cudaHostAlloc(&host[i], kNbytes, cudaHostAllocPortable) == cudaSuccess &&
                 cudaMalloc(&device[i], kNbytes) == cudaSuccess;
    }
    cudaGetLastError();  // Too little memory is an answer, not an error.
  }
  ~Buffers() {
    for (int i = 0; i < 2; ++i) {
      cudaFreeHost(host[i]);
      cudaFree(device[i]);
    }
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  void* host[2] = {};
  void* device[2] = {};
  bool complete = true;
};

// Bytes per second of `issue`, which moves kNbytes a call; the best of three batches.
double best_rate(const std::function<void()>& issue, cudaStream_t first, cudaStream_t second, double most_seconds) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  int calls = 1;
  const auto begin = Clock::now();
  for (int batch = 0; batch < 4; ++batch) {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) {
      issue();
    }
    check_cuda(cudaStreamSynchronize(first), "probe the link");
    check_cuda(cudaStreamSynchronize(second), "probe the link");
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (batch > 0) {
      best = std::max(best, static_cast<double>(kNbytes) * calls / seconds);
    }
    calls = std::clamp(static_cast<int>(most_seconds / 4 / (seconds / calls)), 1, 32);
    if (std::chrono::duration<double>(Clock::now() - begin).count() > most_seconds) {
      break;
    }
  }
  return best;
}

}  // namespace

LinkRates measure_cuda_links(cudaStream_t up, cudaStream_t down, double most_seconds) {
  const Buffers buffers;
  if (!buffers.complete) {
    return {};
  }
  const auto go_up = [&] {
    check_cuda(cudaMemcpyAsync(buffers.device[0], buffers.host[0], kNbytes, cudaMemcpyHostToDevice, up), "probe");
  };
  const auto go_down = [&] {
    check_cuda(cudaMemcpyAsync(buffers.host[1], buffers.device[1], kNbytes, cudaMemcpyDeviceToHost, down), "probe");
  };
  const double part = most_seconds / 4;
  LinkRates rates;
  rates.up = best_rate(go_up, up, down, part);
  rates.down = best_rate(go_down, up, down, part);
  rates.up_both = best_rate(
      [&] {
        go_up();
        go_down();
      },
      up, down, part);
  rates.down_both = rates.up_both;
  rates.device_copy =
      2 * best_rate(
              [&] {
                check_cuda(cudaMemcpyAsync(buffers.device[1], buffers.device[0], kNbytes, cudaMemcpyDeviceToDevice, up),
                           "probe");
              },
              up, down, part);
  return rates;
}

}  // namespace pannier
