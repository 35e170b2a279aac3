#include "pannier/kernels/cuda/convert.h"

#include "pannier/kernels/cuda/map-inl.h"

namespace pannier::kernels::cuda {
namespace {

struct Split {
  const float* master;
  std::uint16_t* hi;
  std::int16_t* lo;

  template <int N>
  __device__ void run(std::int64_t i) const {
    const auto from = load_pack<N>(master + i);
    Pack<std::uint16_t, N> hi_pack;
    Pack<std::int16_t, N> lo_pack;
    for (int n = 0; n < N; ++n) {
      split(from.lanes[n], hi_pack.lanes[n], lo_pack.lanes[n]);
    }
    store_pack(hi + i, hi_pack);
    store_pack(lo + i, lo_pack);
  }
};

struct Join {
  const std::uint16_t* hi;
  const std::int16_t* lo;
  float* master;

  template <int N>
  __device__ void run(std::int64_t i) const {
    const auto hi_pack = load_pack<N>(hi + i);
    const auto lo_pack = load_pack<N>(lo + i);
    Pack<float, N> to;
    for (int n = 0; n < N; ++n) {
      to.lanes[n] = join(hi_pack.lanes[n], lo_pack.lanes[n]);
    }
    store_pack(master + i, to);
  }
};

struct ToFp16 {
  const float* from;
  std::uint16_t* to;

  template <int N>
  __device__ void run(std::int64_t i) const {
    const auto pack = load_pack<N>(from + i);
    Pack<std::uint16_t, N> rounded;
    for (int n = 0; n < N; ++n) {
      rounded.lanes[n] = to_fp16_bits(pack.lanes[n]);
    }
    store_pack(to + i, rounded);
  }
};

}  // namespace

void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel, Stream stream) {
  const bool aligned = is_aligned<kPackNumel>(master) && is_aligned<kPackNumel>(hi) && is_aligned<kPackNumel>(lo);
  launch_map(Split{master, hi, lo}, numel, aligned, stream, "split masters");
}

void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel, Stream stream) {
  const bool aligned = is_aligned<kPackNumel>(master) && is_aligned<kPackNumel>(hi) && is_aligned<kPackNumel>(lo);
  launch_map(Join{hi, lo, master}, numel, aligned, stream, "join masters");
}

void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel, Stream stream) {
  const bool aligned = is_aligned<kPackNumel>(from) && is_aligned<kPackNumel>(to);
  launch_map(ToFp16{from, to}, numel, aligned, stream, "round to fp16");
}

}  // namespace pannier::kernels::cuda
