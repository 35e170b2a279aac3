// Numbers on a GPU with the bits of reference_bits.h: the stored formats, one canonical NaN, packs of several elements
// that travel in one access, and the search for a block's run. For .cu files only.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "pannier/kernels/reference_bits.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels::cuda {

inline constexpr int kThreads = 256;  // Of a thread block.
inline constexpr int kPackNumel = 4;  // 16 bytes of fp32, 8 of a 16-bit type: both coalesce fully.
inline constexpr int kPieceNumel = kThreads * kPackNumel;

/// `N` neighbouring elements. Up to 16 bytes are one access.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T lanes[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

/// Tells the compiler that a pointer read from memory is to device memory, so that it needs no generic access.
template <class T>
__device__ __forceinline__ T* in_device_memory(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/// Whether packs of `N` elements may be read at `pointer`. Null is aligned.
template <int N, class T>
__host__ __device__ __forceinline__ bool is_aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignof(Pack<T, N>) == 0;
}

__device__ __forceinline__ float canonical(float x) { return x != x ? __uint_as_float(reference::kCanonicalNan) : x; }

__device__ __forceinline__ std::uint16_t to_fp16_bits(float x) {
  return x != x ? std::uint16_t{0x7E00U} : __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ float join(std::uint16_t hi, std::int16_t lo) {
  const std::uint32_t high = static_cast<std::uint32_t>(hi) << 16;
  const float joined = __uint_as_float(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(lo)));
  return canonical(joined != joined ? __uint_as_float(high) : joined);
}

__device__ __forceinline__ void split(float master, std::uint16_t& hi, std::int16_t& lo) {
  const std::uint32_t bits = __float_as_uint(canonical(master));
  hi = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
  lo = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits & 0xFFFFU));
}

/// Gradient types: what is stored, and its exact fp32 value. A NaN may keep its payload; whoever stores it makes it
/// canonical.
struct Fp32Lanes {
  using Lane = float;
  static __device__ __forceinline__ float widen(float x) { return x; }
};
struct Fp16Lanes {
  using Lane = std::uint16_t;
  static __device__ __forceinline__ float widen(std::uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
};
struct Bf16Lanes {
  using Lane = std::uint16_t;
  static __device__ __forceinline__ float widen(std::uint16_t bits) {
    return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// Index of the run that holds flat block `block`: the last whose first_block is not above it. The whole warp searches
/// together, 32 ways a round, and must ask for the same block.
template <class Run>
__device__ __forceinline__ int find_run(const Run* runs, int num_runs, std::int64_t block) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int begin = 0;
  int count = num_runs;
  while (count > 1) {
    const int stride = (count + 31) / 32;
    const bool is_before = lane * stride < count && runs[begin + lane * stride].first_block <= block;
    const int hit = 31 - __clz(static_cast<int>(__ballot_sync(0xFFFFFFFFU, is_before)));
    begin += hit * stride;
    count = min(stride, count - hit * stride);
  }
  return begin;
}

}  // namespace pannier::kernels::cuda
