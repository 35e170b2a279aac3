// Which instruction set runs a kernel. Every kernel is compiled for each of Highway's targets that has a native fused
// multiply-add; a table from target to function lets a call pin one without global state. Machines with none of them
// run the plain loops.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pannier::kernels::cpu {

/// Best first; the order of every dispatch table.
enum class Target : std::uint8_t { kAvx3, kAvx2, kNeon, kReference };

/// One function a target; null where this build lacks the target.
template <class Function>
using TargetTable = std::array<Function, 4>;

template <class Function>
Function at_target(const TargetTable<Function>& table, Target target) {
  return table[static_cast<std::size_t>(target)];
}

/// The target of that name, or the best where empty. Throws InternalError if this machine cannot run it.
Target resolve_target(const std::string& name);

}  // namespace pannier::kernels::cpu
