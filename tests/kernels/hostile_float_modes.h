// Float modes that a kernel must not let through, as torch.set_flush_denormal(True) and a careless library leave them.
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pannier::testing {

/// While it lives, this thread flushes denormals to zero (on x86) and rounds upwards.
class HostileFloatModes {
 public:
  HostileFloatModes() {
    std::fegetenv(&saved_);
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040U);
    modes_ = _mm_getcsr();
#endif
  }
  ~HostileFloatModes() { std::fesetenv(&saved_); }
  HostileFloatModes(const HostileFloatModes&) = delete;
  HostileFloatModes& operator=(const HostileFloatModes&) = delete;

  bool are_unchanged() const {
#if defined(__x86_64__)
    return _mm_getcsr() == modes_ && std::fegetround() == FE_UPWARD;
#else
    return std::fegetround() == FE_UPWARD;
#endif
  }

 private:
  std::fenv_t saved_{};
#if defined(__x86_64__)
  unsigned int modes_ = 0;
#endif
};

}  // namespace pannier::testing
