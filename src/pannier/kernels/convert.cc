#include "pannier/kernels/convert.h"

#include "pannier/kernels/cpu/float_modes.h"
#include "pannier/kernels/cpu/kernels.h"

namespace pannier::kernels {
namespace {

constexpr std::int64_t kGrainNumel = std::int64_t{64} << 10;  // The smallest range worth a thread.

}  // namespace

void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel,
                  const ParallelFor& parallel, const std::string& target) {
  const auto kernel = cpu::find_convert_kernels(cpu::resolve_target(target)).split;
  parallel(numel, kGrainNumel, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    kernel(master + begin, hi + begin, lo + begin, end - begin);
  });
}

void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel,
                 const ParallelFor& parallel, const std::string& target) {
  const auto kernel = cpu::find_convert_kernels(cpu::resolve_target(target)).join;
  parallel(numel, kGrainNumel, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    kernel(hi + begin, lo + begin, master + begin, end - begin);
  });
}

void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel, const ParallelFor& parallel,
             const std::string& target) {
  const auto kernel = cpu::find_convert_kernels(cpu::resolve_target(target)).to_fp16;
  parallel(numel, kGrainNumel, [&](std::int64_t begin, std::int64_t end) {
    const cpu::FloatModes modes;
    kernel(from + begin, to + begin, end - begin);
  });
}

}  // namespace pannier::kernels
