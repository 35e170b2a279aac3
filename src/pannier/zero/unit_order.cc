#include "pannier/zero/unit_order.h"

#include <algorithm>
#include <utility>

namespace pannier {

void UnitOrder::saw(int unit) {
  seen_.push_back(unit);
  const auto begin = recorded_.begin() + static_cast<std::ptrdiff_t>(std::min(next_, recorded_.size()));
  auto found = std::find(begin, recorded_.end(), unit);
  if (found == recorded_.end()) {
    found = std::find(recorded_.begin(), begin, unit);  // An evaluation in between, say: back to where it fits.
    found = found == begin ? recorded_.end() : found;
  }
  next_ = found == recorded_.end() ? recorded_.size() : static_cast<std::size_t>(found - recorded_.begin()) + 1;
}

std::span<const int> UnitOrder::ahead() const {
  return std::span(recorded_).subspan(std::min(next_, recorded_.size()));
}

void UnitOrder::end_window() {
  recorded_ = std::exchange(seen_, {});
  next_ = 0;
}

}  // namespace pannier
