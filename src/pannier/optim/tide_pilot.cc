#include "pannier/optim/tide_pilot.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "pannier/base/units.h"

namespace pannier {
namespace {

// Ticks of different kinds have different keys.
constexpr std::int64_t kBackwardKey = std::int64_t{1} << 32;
constexpr std::int64_t kUpdateKey = std::int64_t{1} << 33;

}  // namespace

TidePilot::TidePilot(Device& device, Tide& tide, const UpdateRoutes& routes, std::optional<std::size_t> budget)
    : device_(device), tide_(tide), routes_(routes), budget_(budget) {
  tide_.before_lease([this](int bucket) { make_room(bucket); });
  when_short_ = device_.when_short([this] { return curve_.is_like_last() ? false : tide_.give_back(); });
  (void)device_.take_peak();
}

std::size_t TidePilot::budget() const { return budget_.value_or(curve_.overall()); }

std::size_t TidePilot::slack_nbytes() const {
  return curve_.is_known() ? saturating_sub(budget(), curve_.overall()) : 0;
}
std::size_t TidePilot::room_nbytes() const { return curve_.is_known() ? saturating_sub(budget(), curve_.at_end()) : 0; }

void TidePilot::tick(std::int64_t key) {
  curve_.tick(key, device_.take_peak());
  make_way();
}

void TidePilot::make_way() {
  tide_.shrink_to(saturating_sub(budget(), curve_.until_next_tick()), /*wait=*/true, /*also_raised=*/true);
}

void TidePilot::tick_forward(int unit) {
  curve_.tick(unit, device_.take_peak());
  if (on_peak_ && curve_.peaks_until_next_tick()) {
    on_peak_();
  }
  make_way();
}

void TidePilot::tick_backward(int bucket) {
  tick(kBackwardKey + bucket);
  if (may_raise_) {
    raise_while_room();
  }
}

void TidePilot::tick_update() {
  tick(kUpdateKey);
  may_raise_ = false;
}

void TidePilot::end_step() {
  curve_.end_step(device_.take_peak());
  // A model whose forward does not tick has its peak before the first tick.
  tide_.shrink_to(saturating_sub(budget(), curve_.until_first_tick()), /*wait=*/true, /*also_raised=*/true);
}

// What goes up early saves time only, so that memory which others took first is no error.
bool TidePilot::try_raise(int bucket) {
  try {
    tide_.raise(bucket);
    return true;
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
}

// In the order in which they will be updated. What is up already stays.
void TidePilot::raise_while_room() {
  const std::size_t room = saturating_sub(budget(), curve_.until_end());
  for (const bool is_up : {true, false}) {
    for (int b = static_cast<int>(routes_.routes().size()) - 1; b >= 0; --b) {
      if (routes_.route(b) != UpdateRoute::kStreamed || tide_.is_up(b) != is_up) {
        continue;
      }
      if ((!is_up && tide_.live_nbytes() + tide_.nbytes(b) > room) || !try_raise(b)) {
        return;
      }
    }
  }
}

// In the update there must be room for the bucket at hand, whatever the budget says; more than one are raised where it
// allows, so that transfers and updates overlap.
void TidePilot::make_room(int bucket) {
  const std::size_t others = saturating_sub(device_.memory().current, tide_.live_nbytes());
  const std::size_t room = saturating_sub(budget(), others);
  tide_.shrink_to(saturating_sub(room, tide_.nbytes(bucket)), /*wait=*/true, /*also_raised=*/true);
  tide_.raise(bucket);
  for (int b = bucket - 1; b >= 0; --b) {
    if (routes_.route(b) != UpdateRoute::kStreamed || tide_.is_up(b)) {
      continue;
    }
    if (tide_.live_nbytes() + tide_.nbytes(b) > room || !try_raise(b)) {
      return;
    }
  }
}

}  // namespace pannier
