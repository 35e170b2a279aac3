#include "pannier/kernels/cpu/targets.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "hwy/targets.h"
#include "pannier/base/error.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels {
namespace cpu {
namespace {

constexpr TargetTable<const char*> kNames = {"AVX3", "AVX2", "NEON", "reference"};
constexpr TargetTable<std::int64_t> kHighwayTargets = {HWY_AVX3, HWY_AVX2, HWY_NEON, 0};

bool is_available(std::size_t index) {
  static const std::int64_t runnable = HWY_TARGETS & hwy::SupportedTargets();  // Asks the CPU, which is slow in a VM.
  return kHighwayTargets[index] == 0 || (runnable & kHighwayTargets[index]) != 0;
}

}  // namespace

Target resolve_target(const std::string& name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (is_available(i) && (name.empty() || name == kNames[i])) {
      return static_cast<Target>(i);
    }
  }
  throw InternalError(
      fmt::format("unknown kernel target \"{}\"; this machine runs {}", name, fmt::join(available_targets(), ", ")));
}

}  // namespace cpu

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < cpu::kNames.size(); ++i) {
    if (cpu::is_available(i)) {
      names.emplace_back(cpu::kNames[i]);
    }
  }
  return names;
}

}  // namespace pannier::kernels
