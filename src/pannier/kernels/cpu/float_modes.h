// The floating-point modes that bit-identical arithmetic needs. Pool threads inherit flush-to-zero or a rounding mode
// from whoever created them, so every kernel entry sets its own.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pannier::kernels::cpu {

/// While it lives, this thread rounds to nearest even, keeps denormals and masks floating-point traps; then the
/// caller's modes are back. One thread. Kernels are called through pointers, so no operation moves across it.
class FloatModes {
 public:
  FloatModes() noexcept : saved_(read()) { write(kModes); }
  ~FloatModes() { write(saved_); }
  FloatModes(const FloatModes&) = delete;
  FloatModes& operator=(const FloatModes&) = delete;

 private:
#if defined(__x86_64__)
  using Register = unsigned int;
  static constexpr Register kModes = 0x1F80;  // MXCSR: nearest even, no FTZ, no DAZ, all traps masked.
  static Register read() noexcept { return _mm_getcsr(); }
  static void write(Register value) noexcept { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;
  static constexpr Register kModes = 0;  // FPCR: nearest even, no FZ, no traps.
  static Register read() noexcept {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) noexcept { asm volatile("msr fpcr, %0" : : "r"(value) : "memory"); }
#endif

  Register saved_;
};

}  // namespace pannier::kernels::cpu
