// Compiles the including file once for each Highway target with a native fused multiply-add. SSE4 and SSSE3 are left
// out: there MulAdd rounds twice. Highway's scalar target, the baseline, is compiled empty.
// No include guard: each kernel file includes this once, after defining HWY_TARGET_INCLUDE.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

// The dispatch table of a function that exists in each target's namespace; `plain` serves Target::kReference.
#ifndef PANNIER_TARGET_TABLE
#define PANNIER_TARGET_TABLE(function, plain) \
  {HWY_CHOOSE_AVX3(function), HWY_CHOOSE_AVX2(function), HWY_CHOOSE_NEON(function), plain}
#endif
