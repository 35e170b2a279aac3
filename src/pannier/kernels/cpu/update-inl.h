// The loop that every update rule shares: load weight, states and gradient, apply the rule, store. A rule is a class
// that broadcasts its constants once and changes one vector of each. Included once per Highway target.
#if defined(PANNIER_KERNELS_CPU_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PANNIER_KERNELS_CPU_UPDATE_INL_H_
#undef PANNIER_KERNELS_CPU_UPDATE_INL_H_
#else
#define PANNIER_KERNELS_CPU_UPDATE_INL_H_
#endif

#include "hwy/cache_control.h"
#include "pannier/kernels/cpu/kernels.h"
#include "pannier/kernels/cpu/lanes-inl.h"

#if HWY_NATIVE_FMA
HWY_BEFORE_NAMESPACE();
namespace pannier::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kPrefetchDistance = 256;  // In elements; from 128 to 512 the speed is the same.

/// State formats: what `param` and `rest` hold, and whether each is read.
struct Fp32Weight {
  using Param = float;
  using Rest = float;  // Unused.
  static constexpr bool kHasRest = false;
  static HWY_INLINE Vec load(const float* param, const float* /*rest*/, std::size_t i) {
    return hn::LoadU(F32(), param + i);
  }
  static HWY_INLINE void store(Vec w, float* param, float* /*rest*/, std::size_t i) { hn::StoreU(w, F32(), param + i); }
};
struct Fp16Weight {
  using Param = std::uint16_t;
  using Rest = float;
  static constexpr bool kHasRest = true;
  static HWY_INLINE Vec load(const std::uint16_t* /*param*/, const float* rest, std::size_t i) {
    return hn::LoadU(F32(), rest + i);
  }
  static HWY_INLINE void store(Vec w, std::uint16_t* param, float* rest, std::size_t i) {
    hn::StoreU(w, F32(), rest + i);
    store_fp16(w, param + i);
  }
};
struct Bf16Weight {
  using Param = std::uint16_t;
  using Rest = std::int16_t;
  static constexpr bool kHasRest = true;
  static HWY_INLINE Vec load(const std::uint16_t* param, const std::int16_t* rest, std::size_t i) {
    return load_split(param + i, rest + i);
  }
  static HWY_INLINE void store(Vec w, std::uint16_t* param, std::int16_t* rest, std::size_t i) {
    store_split(w, param + i, rest + i);
  }
};

/// The typed pointers of one run.
template <class Weight, class Grad>
struct Streams {
  explicit Streams(const UpdateBuffers& b)
      : param(static_cast<typename Weight::Param*>(b.param)),
        rest(static_cast<typename Weight::Rest*>(b.rest)),
        state1(b.state1),
        state2(b.state2),
        grad(static_cast<const typename Grad::Lane*>(b.grad)) {}

  typename Weight::Param* param;
  typename Weight::Rest* rest;
  float* state1;
  float* state2;
  const typename Grad::Lane* grad;
};

/// Updates one vector of elements, from element `i` on.
template <class Rule, class Weight, class Grad>
HWY_INLINE void update_lanes(const Rule& rule, Vec factor, const Streams<Weight, Grad>& s, std::size_t i) {
  const Vec g = hn::Mul(Grad::load(s.grad + i), factor);
  Vec w = Weight::load(s.param, s.rest, i);
  Vec state1 = hn::Zero(F32());
  Vec state2 = hn::Zero(F32());
  if constexpr (Rule::kNumStates >= 1) {
    state1 = hn::LoadU(F32(), s.state1 + i);
  }
  if constexpr (Rule::kNumStates >= 2) {
    state2 = hn::LoadU(F32(), s.state2 + i);
  }
  rule.apply(g, w, state1, state2);
  Weight::store(canonical(w), s.param, s.rest, i);
  if constexpr (Rule::kNumStates >= 1) {
    hn::StoreU(canonical(state1), F32(), s.state1 + i);
  }
  if constexpr (Rule::kNumStates >= 2) {
    hn::StoreU(canonical(state2), F32(), s.state2 + i);
  }
}

/// Fetches what update_lanes will read a little later, for two vectors from element `i` on: the processor's own
/// prefetchers stop at page ends and lose track of this many streams. May point past the end, where it has no effect.
/// Worth 8 % with the five streams of a split master; with the four of fp32 it costs 12 %, so those go without.
template <class Rule, class Weight, class Grad>
HWY_INLINE void prefetch_lanes(const Streams<Weight, Grad>& s, std::size_t i) {
  const auto fetch = [](const auto* from) {
    for (std::size_t line = 0; line < 2 * kLanes * sizeof(*from); line += kCacheLine) {
      hwy::Prefetch(reinterpret_cast<const char*>(from) + line);
    }
  };
  fetch(s.grad + i);
  fetch(s.param + i);
  fetch(s.rest + i);
  if constexpr (Rule::kNumStates >= 1) {
    fetch(s.state1 + i);
  }
  if constexpr (Rule::kNumStates >= 2) {
    fetch(s.state2 + i);
  }
}

/// Updates the last `count` elements, from element `begin` on, through copies padded with zeros.
template <class Rule, class Weight, class Grad>
HWY_NOINLINE void update_tail(const Rule& rule, Vec factor, const Streams<Weight, Grad>& s, std::size_t begin,
                              std::size_t count) {
  TailLanes<typename Weight::Param> param;
  TailLanes<typename Weight::Rest> rest;
  TailLanes<float> state1;
  TailLanes<float> state2;
  TailLanes<typename Grad::Lane> grad;
  param.fill(s.param + begin, count);
  grad.fill(s.grad + begin, count);
  if constexpr (Weight::kHasRest) {
    rest.fill(s.rest + begin, count);
  }
  if constexpr (Rule::kNumStates >= 1) {
    state1.fill(s.state1 + begin, count);
  }
  if constexpr (Rule::kNumStates >= 2) {
    state2.fill(s.state2 + begin, count);
  }
  Streams<Weight, Grad> copy = s;
  copy.param = param.lanes;
  copy.rest = rest.lanes;
  copy.state1 = state1.lanes;
  copy.state2 = state2.lanes;
  copy.grad = grad.lanes;
  update_lanes(rule, factor, copy, 0);
  param.spill(s.param + begin, count);
  if constexpr (Weight::kHasRest) {
    rest.spill(s.rest + begin, count);
  }
  if constexpr (Rule::kNumStates >= 1) {
    state1.spill(s.state1 + begin, count);
  }
  if constexpr (Rule::kNumStates >= 2) {
    state2.spill(s.state2 + begin, count);
  }
}

template <class Rule, class Weight, class Grad>
void update_run(const UpdateCoefficients& c, const UpdateBuffers& buffers) {
  const Rule rule(c);
  const Vec factor = hn::Set(F32(), c.grad_factor);
  const Streams<Weight, Grad> streams(buffers);
  const auto numel = static_cast<std::size_t>(buffers.numel);
  std::size_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    if constexpr (Weight::kHasRest) {
      prefetch_lanes<Rule>(streams, i + kPrefetchDistance);
    }
    update_lanes(rule, factor, streams, i);
    update_lanes(rule, factor, streams, i + kLanes);
  }
  for (; i + kLanes <= numel; i += kLanes) {
    update_lanes(rule, factor, streams, i);
  }
  if (i < numel) {
    update_tail(rule, factor, streams, i, numel - i);
  }
}

/// The kernel of a rule for a format and gradient type, or null for one that cannot occur.
template <class Rule>
cpu::UpdateKernel find_rule(StateFormat format, GradType type) {
  switch (format) {
    case StateFormat::kFp32:
      return type == GradType::kFp32   ? &update_run<Rule, Fp32Weight, Fp32Lanes>
             : type == GradType::kFp16 ? &update_run<Rule, Fp32Weight, Fp16Lanes>
                                       : &update_run<Rule, Fp32Weight, Bf16Lanes>;
    case StateFormat::kFp16:
      return type == GradType::kFp32   ? &update_run<Rule, Fp16Weight, Fp32Lanes>
             : type == GradType::kFp16 ? &update_run<Rule, Fp16Weight, Fp16Lanes>
                                       : nullptr;
    case StateFormat::kBf16:
      return type == GradType::kFp32   ? &update_run<Rule, Bf16Weight, Fp32Lanes>
             : type == GradType::kBf16 ? &update_run<Rule, Bf16Weight, Bf16Lanes>
                                       : nullptr;
  }
  return nullptr;
}

}  // namespace pannier::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_NATIVE_FMA
#endif  // Toggled guard.
