#include "pannier/plan/memory_curve.h"

#include <algorithm>

namespace pannier {

void MemoryCurve::end_interval(std::size_t peak_nbytes) {
  if (seen_.empty()) {
    before_first_ = std::max(before_first_, peak_nbytes);
  } else {
    seen_.back().peak_nbytes = std::max(seen_.back().peak_nbytes, peak_nbytes);
  }
  seen_overall_ = std::max(seen_overall_, peak_nbytes);
}

void MemoryCurve::tick(std::int64_t key, std::size_t peak_nbytes) {
  end_interval(peak_nbytes);
  const std::size_t index = seen_.size();
  // Within a step the course varies a little, since gradients leave when their transfer is done; the peak does not.
  const bool is_more = seen_overall_ > known_overall_ + known_overall_ / 50;
  like_last_ = like_last_ && !is_more && index < known_.size() && known_[index].key == key;
  if (index < kMostTicks) {
    seen_.push_back({key, 0});
  }
}

void MemoryCurve::end_step(std::size_t peak_nbytes) {
  end_interval(peak_nbytes);
  const bool same = like_last_ && seen_.size() == known_.size();
  for (std::size_t i = 0; same && i < seen_.size(); ++i) {
    // A step that took less lets the course sink slowly: batches of changing length come back.
    const std::size_t before = known_[i].peak_nbytes;
    if (seen_[i].peak_nbytes < before) {
      seen_[i].peak_nbytes = before - (before - seen_[i].peak_nbytes) / 8;
    }
  }
  known_.swap(seen_);
  seen_.clear();
  known_rest_.assign(known_.size(), 0);
  std::size_t rest = 0;
  for (std::size_t i = known_.size(); i-- > 0;) {
    rest = std::max(rest, known_[i].peak_nbytes);
    known_rest_[i] = rest;
  }
  known_before_first_ = before_first_;
  known_overall_ = std::max(rest, before_first_);
  seen_overall_ = 0;
  before_first_ = 0;
  like_last_ = true;
}

std::size_t MemoryCurve::overall() const { return std::max(known_overall_, seen_overall_); }

std::size_t MemoryCurve::until_next_tick() const {
  return is_like_last() ? known_[seen_.size() - 1].peak_nbytes : overall();
}

bool MemoryCurve::peaks_until_next_tick() const {
  return is_like_last() && until_next_tick() + known_overall_ / 50 >= known_overall_;
}

std::size_t MemoryCurve::until_end() const { return is_like_last() ? known_rest_[seen_.size() - 1] : overall(); }

}  // namespace pannier
