// Which unit of a model comes after which: recorded over one accumulation window, used to look ahead in the next.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace pannier {

/// One thread.
class UnitOrder {
 public:
  /// A unit is needed now.
  void saw(int unit);
  /// Units that came after this moment in the last window, in their order; empty where it went another way.
  [[nodiscard]] std::span<const int> ahead() const;
  /// What was seen since the last call becomes the record.
  void end_window();

 private:
  std::vector<int> recorded_;
  std::vector<int> seen_;
  std::size_t next_ = 0;  ///< In recorded_: what should come.
};

}  // namespace pannier
