#include "pannier/hardware/copy_kernels.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pannier {
namespace {

void copy_by_memcpy(std::byte* to, const std::byte* from, std::size_t nbytes) { std::memcpy(to, from, nbytes); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) void copy_by_avx2_streaming(std::byte* to, const std::byte* from, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) {
    const __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), high);
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void copy_by_avx512_streaming(std::byte* to, const std::byte* from,
                                                                 std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  }
  _mm_sfence();
}

// Fetches 4 KiB ahead past the second-level cache.
__attribute__((target("avx512f"))) void copy_by_avx512_prefetching(std::byte* to, const std::byte* from,
                                                                   std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) {
    _mm_prefetch(from + i + 4096, _MM_HINT_NTA);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  }
  _mm_sfence();
}

// Fetches 4 KiB, then writes them, so that DRAM turns around less often.
__attribute__((target("avx512f"))) void copy_by_avx512_blocks(std::byte* to, const std::byte* from,
                                                              std::size_t nbytes) {
  constexpr std::size_t kBlock = 4096;
  for (std::size_t begin = 0; begin < nbytes; begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, nbytes);
    for (std::size_t i = begin; i < end; i += 64) {
      _mm_prefetch(from + i, _MM_HINT_T0);
    }
    for (std::size_t i = begin; i < end; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
    }
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void copy_by_avx512(std::byte* to, const std::byte* from, std::size_t nbytes) {
  for (std::size_t i = 0; i < nbytes; i += 64) {
    _mm512_store_si512(to + i, _mm512_load_si512(from + i));
  }
}
#endif

}  // namespace

std::vector<CopyKernel> available_copy_kernels() {
  std::vector<CopyKernel> copies = {{"memcpy", &copy_by_memcpy}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    copies.push_back({"avx2_streaming", &copy_by_avx2_streaming});
  }
  if (__builtin_cpu_supports("avx512f")) {
    copies.push_back({"avx512_streaming", &copy_by_avx512_streaming});
    copies.push_back({"avx512_streaming_prefetching", &copy_by_avx512_prefetching});
    copies.push_back({"avx512_streaming_blocks", &copy_by_avx512_blocks});
    copies.push_back({"avx512", &copy_by_avx512});
  }
#endif
  return copies;
}

}  // namespace pannier
