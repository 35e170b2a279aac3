// The kernel that every update rule shares: a thread block a block of elements, load, apply the rule, store. A rule is
// a struct with kNumStates and apply(); it states reference.h's operations with intrinsics that round once and that no
// compiler flag contracts. For .cu files only.
#pragma once

#include "pannier/kernels/cuda/cuda_error.h"
#include "pannier/kernels/cuda/lanes-inl.h"
#include "pannier/kernels/cuda/update.h"
#include "pannier/layout/bucket_layout.h"

namespace pannier::kernels::cuda {

/// State formats: what `param` and `rest` hold, and whether each is read.
struct Fp32Weight {
  using Param = float;
  using Rest = float;  // Unused.
  static constexpr bool kReadsParam = true;
  static constexpr bool kHasRest = false;
  static __device__ __forceinline__ float load(float param, float /*rest*/) { return param; }
  static __device__ __forceinline__ void store(float w, float& param, float& /*rest*/) { param = canonical(w); }
};
struct Fp16Weight {
  using Param = std::uint16_t;
  using Rest = float;
  static constexpr bool kReadsParam = false;
  static constexpr bool kHasRest = true;
  static __device__ __forceinline__ float load(std::uint16_t /*param*/, float rest) { return rest; }
  static __device__ __forceinline__ void store(float w, std::uint16_t& param, float& rest) {
    rest = canonical(w);
    param = to_fp16_bits(w);
  }
};
struct Bf16Weight {
  using Param = std::uint16_t;
  using Rest = std::int16_t;
  static constexpr bool kReadsParam = true;
  static constexpr bool kHasRest = true;
  static __device__ __forceinline__ float load(std::uint16_t hi, std::int16_t lo) { return join(hi, lo); }
  static __device__ __forceinline__ void store(float w, std::uint16_t& hi, std::int16_t& lo) { split(w, hi, lo); }
};

/// The typed pointers of one run.
template <class Weight, class Grad>
struct Streams {
  explicit __device__ Streams(const UpdateBuffers& b)
      : param(in_device_memory(static_cast<typename Weight::Param*>(b.param))),
        rest(in_device_memory(static_cast<typename Weight::Rest*>(b.rest))),
        state1(in_device_memory(b.state1)),
        state2(in_device_memory(b.state2)),
        grad(in_device_memory(static_cast<const typename Grad::Lane*>(b.grad))) {}

  __device__ bool are_aligned() const {
    return is_aligned<kPackNumel>(param) && is_aligned<kPackNumel>(rest) && is_aligned<kPackNumel>(state1) &&
           is_aligned<kPackNumel>(state2) && is_aligned<kPackNumel>(grad);
  }

  typename Weight::Param* param;
  typename Weight::Rest* rest;
  float* state1;
  float* state2;
  const typename Grad::Lane* grad;
};

/// Updates `N` neighbouring elements, from element `i` on. All loads come before the first store.
template <int N, class Rule, class Weight, class Grad>
__device__ __forceinline__ void update_pack(const UpdateCoefficients& c, const Streams<Weight, Grad>& s,
                                            std::int64_t i) {
  const auto grad = load_pack<N>(s.grad + i);
  Pack<typename Weight::Param, N> param;
  Pack<typename Weight::Rest, N> rest;
  Pack<float, N> state1{};
  Pack<float, N> state2{};
  if constexpr (Weight::kReadsParam) {
    param = load_pack<N>(s.param + i);
  }
  if constexpr (Weight::kHasRest) {
    rest = load_pack<N>(s.rest + i);
  }
  if constexpr (Rule::kNumStates >= 1) {
    state1 = load_pack<N>(s.state1 + i);
  }
  if constexpr (Rule::kNumStates >= 2) {
    state2 = load_pack<N>(s.state2 + i);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float g = __fmul_rn(Grad::widen(grad.lanes[n]), c.grad_factor);
    float w = Weight::load(param.lanes[n], rest.lanes[n]);
    Rule::apply(c, g, w, state1.lanes[n], state2.lanes[n]);
    Weight::store(w, param.lanes[n], rest.lanes[n]);
    state1.lanes[n] = canonical(state1.lanes[n]);
    state2.lanes[n] = canonical(state2.lanes[n]);
  }
  store_pack(s.param + i, param);
  if constexpr (Weight::kHasRest) {
    store_pack(s.rest + i, rest);
  }
  if constexpr (Rule::kNumStates >= 1) {
    store_pack(s.state1 + i, state1);
  }
  if constexpr (Rule::kNumStates >= 2) {
    store_pack(s.state2 + i, state2);
  }
}

template <class Rule, class Weight, class Grad>
__global__ void __launch_bounds__(kThreads) update_kernel(detail::UpdateArguments arguments) {
  if (arguments.control.skip != nullptr && *arguments.control.skip != 0) {
    return;
  }
  const std::int64_t block = blockIdx.x;
  const UpdateRun& run = arguments.runs[find_run(arguments.runs, arguments.num_runs, block)];
  UpdateCoefficients c = run.task.coefficients;
  if (arguments.control.grad_factor != nullptr) {
    c.grad_factor = *arguments.control.grad_factor;
  }
  const Streams<Weight, Grad> streams(run.task.buffers);
  const std::int64_t begin = (block - run.first_block) * kBlockNumel;
  const std::int64_t end = min(begin + kBlockNumel, run.task.buffers.numel);
  std::int64_t piece = begin;
  if (streams.are_aligned()) {
    for (; piece + kPieceNumel <= end; piece += kPieceNumel) {
      update_pack<kPackNumel, Rule>(c, streams, piece + threadIdx.x * kPackNumel);
    }
  }
  for (std::int64_t i = piece + threadIdx.x; i < end; i += kThreads) {
    update_pack<1, Rule>(c, streams, i);
  }
}

template <class Rule, class Weight, class Grad>
void launch_variant(const UpdateBatch& batch, const detail::UpdateArguments& arguments, Stream stream) {
  const auto grid = static_cast<unsigned>(batch.num_blocks);
  update_kernel<Rule, Weight, Grad><<<grid, kThreads, 0, stream>>>(arguments);
  check_launch("update parameters");
}

/// Launches a rule for the batch's format and gradient type; make_update_batch has refused what cannot occur.
template <class Rule>
void launch_rule(const UpdateBatch& batch, const detail::UpdateArguments& arguments, Stream stream) {
  const GradType type = batch.grad_type;
  switch (batch.format) {
    case StateFormat::kFp32:
      return type == GradType::kFp32   ? launch_variant<Rule, Fp32Weight, Fp32Lanes>(batch, arguments, stream)
             : type == GradType::kFp16 ? launch_variant<Rule, Fp32Weight, Fp16Lanes>(batch, arguments, stream)
                                       : launch_variant<Rule, Fp32Weight, Bf16Lanes>(batch, arguments, stream);
    case StateFormat::kFp16:
      return type == GradType::kFp32 ? launch_variant<Rule, Fp16Weight, Fp32Lanes>(batch, arguments, stream)
                                     : launch_variant<Rule, Fp16Weight, Fp16Lanes>(batch, arguments, stream);
    case StateFormat::kBf16:
      return type == GradType::kFp32 ? launch_variant<Rule, Bf16Weight, Fp32Lanes>(batch, arguments, stream)
                                     : launch_variant<Rule, Bf16Weight, Bf16Lanes>(batch, arguments, stream);
  }
}

}  // namespace pannier::kernels::cuda
