#include "pannier/kernels/cuda/gradient.h"

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/kernels/cuda/map-inl.h"

namespace pannier::kernels::cuda {
namespace {

constexpr int kTreeLanes = 32;      // Of gradient.h's tree.
constexpr int kLanesPerThread = 2;  // So 16 threads share a block: a small bucket, too, fills the device.
constexpr int kRowsInFlight = 16;   // Loads that a thread has under way.
constexpr int kStatsThreads = 128;  // Of a thread block: so few that a bucket has work for every multiprocessor.
constexpr unsigned kWholeWarp = 0xFFFFFFFFU;

// Adds a finite non-negative number to limbs in the block's shared memory: ExactSum::add. A block sum is zero or far
// above 2^-340, so no bits are dropped.
__device__ void add_to_limbs(double value, unsigned long long* limbs) {
  if (value == 0) {
    return;
  }
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
  const unsigned long long mantissa = (bits & 0xFFFFFFFFFFFFFULL) | 0x10000000000000ULL;
  const int position = static_cast<int>(bits >> 52) - 1075 + 340;
  const int limb = position / 32;
  const int shift = position % 32;
  atomicAdd(&limbs[limb], (mantissa << shift) & 0xFFFFFFFFULL);
  atomicAdd(&limbs[limb + 1], (mantissa >> (32 - shift)) & 0xFFFFFFFFULL);
  atomicAdd(&limbs[limb + 2], (mantissa >> 32) >> (32 - shift));
}

// The part of a block that one thread sums: neighbouring lanes of the tree, so that it reads one pack in each row.
template <class Grad>
struct LaneSums {
  using Lane = typename Grad::Lane;
  static constexpr int kNumel = kLanesPerThread;
  static constexpr int kThreadsPerBlock = kTreeLanes / kNumel;

  double lanes[kNumel] = {};

  __device__ __forceinline__ void add(const Pack<Lane, kNumel>& pack) {
#pragma unroll
    for (int n = 0; n < kNumel; ++n) {
      const double x = Grad::widen(pack.lanes[n]);
      lanes[n] = __fma_rn(x, x, lanes[n]);
    }
  }

  // Adds this thread's lanes of the first `numel` elements of a block.
  __device__ __forceinline__ void add_block(const Lane* grad, int numel, int first_lane) {
    int row = 0;
    if (is_aligned<kNumel>(grad)) {
      for (; row + kRowsInFlight <= numel / kTreeLanes; row += kRowsInFlight) {
        Pack<Lane, kNumel> packs[kRowsInFlight];
#pragma unroll
        for (int k = 0; k < kRowsInFlight; ++k) {
          packs[k] = load_pack<kNumel>(grad + (row + k) * kTreeLanes + first_lane);
        }
#pragma unroll
        for (int k = 0; k < kRowsInFlight; ++k) {
          add(packs[k]);
        }
      }
    }
    for (; row * kTreeLanes < numel; ++row) {
#pragma unroll
      for (int n = 0; n < kNumel; ++n) {
        const int i = row * kTreeLanes + first_lane + n;
        if (i < numel) {
          const double x = Grad::widen(grad[i]);
          lanes[n] = __fma_rn(x, x, lanes[n]);
        }
      }
    }
  }

  // Combines the 32 lanes by halves: between threads first, then within the first. Every thread of the warp calls it.
  __device__ __forceinline__ double combine() {
#pragma unroll
    for (int half = kThreadsPerBlock / 2; half > 0; half /= 2) {
#pragma unroll
      for (int n = 0; n < kNumel; ++n) {
        lanes[n] = __dadd_rn(lanes[n], __shfl_down_sync(kWholeWarp, lanes[n], half, kThreadsPerBlock));
      }
    }
#pragma unroll
    for (int half = kNumel / 2; half > 0; half /= 2) {
#pragma unroll
      for (int n = 0; n < half; ++n) {
        lanes[n] = __dadd_rn(lanes[n], lanes[n + half]);
      }
    }
    return __shfl_sync(kWholeWarp, lanes[0], 0, kThreadsPerBlock);
  }
};

template <class Grad>
__device__ unsigned count_nonfinite(const typename Grad::Lane* grad, int numel, int begin, int stride) {
  unsigned count = 0;
  for (int i = begin; i < numel; i += stride) {
    count += isfinite(Grad::widen(grad[i])) ? 0U : 1U;
  }
  return count;
}

struct StatsArguments {
  const GradientRun* runs;
  int num_runs;
  std::int64_t num_blocks;
  DeviceGradientStats* stats;
  std::int64_t* nonfinite_by_run;
};

__device__ void add_to(std::int64_t* to, unsigned long long value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
}

template <class Grad>
__global__ void __launch_bounds__(kStatsThreads) stats_kernel(StatsArguments arguments) {
  using Sums = LaneSums<Grad>;
  constexpr int kBlocksPerWarp = 32 / Sums::kThreadsPerBlock;
  __shared__ unsigned long long limbs[ExactSum::kNumLimbs];
  if (threadIdx.x < ExactSum::kNumLimbs) {
    limbs[threadIdx.x] = 0;
  }
  __syncthreads();

  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * kStatsThreads + threadIdx.x) / 32;
  const std::int64_t first = warp * kBlocksPerWarp;
  const int member = static_cast<int>(threadIdx.x % Sums::kThreadsPerBlock);
  const std::int64_t block = first + (threadIdx.x % 32) / Sums::kThreadsPerBlock;
  int run = find_run(arguments.runs, arguments.num_runs, first);
  Sums sums;
  const typename Grad::Lane* grad = nullptr;
  int numel = 0;
  if (block < arguments.num_blocks) {
    while (run + 1 < arguments.num_runs && arguments.runs[run + 1].first_block <= block) {
      ++run;
    }
    const std::int64_t offset = (block - arguments.runs[run].first_block) * kBlockNumel;
    grad = in_device_memory(static_cast<const typename Grad::Lane*>(arguments.runs[run].grad)) + offset;
    numel = static_cast<int>(
        min(static_cast<long long>(kBlockNumel), static_cast<long long>(arguments.runs[run].numel - offset)));
    sums.add_block(grad, numel, member * Sums::kNumel);
  }
  __syncwarp();
  const double sum = sums.combine();
  if (!isfinite(sum)) {  // Squares of finite fp32 numbers cannot overflow fp64, so some element is not finite.
    const unsigned count = count_nonfinite<Grad>(grad, numel, member, Sums::kThreadsPerBlock);
    add_to(&arguments.stats->num_nonfinite, count);
    if (arguments.nonfinite_by_run != nullptr) {
      add_to(&arguments.nonfinite_by_run[run], count);
    }
  } else if (member == 0) {
    add_to_limbs(sum, limbs);
  }
  __syncthreads();
  if (threadIdx.x < ExactSum::kNumLimbs && limbs[threadIdx.x] != 0) {
    add_to(&arguments.stats->limbs[threadIdx.x], limbs[threadIdx.x]);
  }
}

template <class Grad>
void launch_stats(const StatsArguments& arguments, Stream stream) {
  constexpr int kBlocksPerThreadBlock = kStatsThreads / LaneSums<Grad>::kThreadsPerBlock;
  const auto grid = static_cast<unsigned>((arguments.num_blocks + kBlocksPerThreadBlock - 1) / kBlocksPerThreadBlock);
  stats_kernel<Grad><<<grid, kStatsThreads, 0, stream>>>(arguments);
  check_launch("sum squares of gradients");
}

template <class Grad, bool kFirst>
struct Accumulate {
  float* sum;
  const typename Grad::Lane* grad;

  template <int N>
  __device__ void run(std::int64_t i) const {
    const auto from = load_pack<N>(grad + i);
    Pack<float, N> to;
    if constexpr (!kFirst) {
      to = load_pack<N>(sum + i);
    }
    for (int n = 0; n < N; ++n) {
      const float g = Grad::widen(from.lanes[n]);
      to.lanes[n] = canonical(kFirst ? g : __fadd_rn(to.lanes[n], g));
    }
    store_pack(sum + i, to);
  }
};

template <class Grad>
void launch_accumulate(float* sum, const void* grad, std::int64_t numel, bool first, Stream stream) {
  const auto* lanes = static_cast<const typename Grad::Lane*>(grad);
  const bool aligned = is_aligned<kPackNumel>(sum) && is_aligned<kPackNumel>(lanes);
  if (first) {
    launch_map(Accumulate<Grad, true>{sum, lanes}, numel, aligned, stream, "accumulate gradients");
  } else {
    launch_map(Accumulate<Grad, false>{sum, lanes}, numel, aligned, stream, "accumulate gradients");
  }
}

}  // namespace

std::int64_t number_blocks(std::span<GradientRun> runs) {
  std::int64_t num_blocks = 0;
  for (auto& run : runs) {
    run.first_block = num_blocks;
    num_blocks += (run.numel + kBlockNumel - 1) / kBlockNumel;
  }
  return num_blocks;
}

void gradient_stats(const GradientRun* runs, int num_runs, std::int64_t num_blocks, GradType type,
                    DeviceGradientStats* stats, std::int64_t* nonfinite_by_run, Stream stream) {
  if (num_blocks == 0) {
    return;
  }
  const StatsArguments arguments{runs, num_runs, num_blocks, stats, nonfinite_by_run};
  switch (type) {
    case GradType::kFp32:
      return launch_stats<Fp32Lanes>(arguments, stream);
    case GradType::kFp16:
      return launch_stats<Fp16Lanes>(arguments, stream);
    case GradType::kBf16:
      return launch_stats<Bf16Lanes>(arguments, stream);
  }
}

GradientStats to_host_stats(const DeviceGradientStats& stats) {
  GradientStats host;
  std::copy(std::begin(stats.limbs), std::end(stats.limbs), host.sum_of_squares.limbs().begin());
  host.num_nonfinite = stats.num_nonfinite;
  return host;
}

void accumulate(float* sum, const void* grad, GradType type, std::int64_t numel, bool first, Stream stream) {
  switch (type) {
    case GradType::kFp32:
      return launch_accumulate<Fp32Lanes>(sum, grad, numel, first, stream);
    case GradType::kFp16:
      return launch_accumulate<Fp16Lanes>(sum, grad, numel, first, stream);
    case GradType::kBf16:
      return launch_accumulate<Bf16Lanes>(sum, grad, numel, first, stream);
  }
}

}  // namespace pannier::kernels::cuda
