// How far other processes kept cores busy while something was measured: what was measured beside them says little about
// the machine.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>

namespace pannier {

/// Watches the cores that this process may run on, from its making on.
class CoreUse {
 public:
  explicit CoreUse(std::filesystem::path root = "/");
  /// Cores that were idle or ours, on average; nothing is known (no /proc/stat, or less than a tick went by): all.
  [[nodiscard]] double cores_left() const;
  [[nodiscard]] int num_cores() const noexcept { return static_cast<int>(begin_.size()); }

 private:
  /// Ticks of one core.
  struct Ticks {
    std::size_t busy = 0;
    std::size_t all = 0;
  };
  [[nodiscard]] std::map<int, Ticks> read() const;  ///< Of all cores.

  std::filesystem::path root_;
  std::map<int, Ticks> begin_;  ///< By the core's number.
  double own_begin_s_;
};

}  // namespace pannier
