// The course of device memory through a step, as it was seen in the steps before: how much the model itself takes
// between one tick and the next. A tick is a moment at which the engine is called anyway (a unit's forward, a bucket of
// gradients that is complete), so that the course costs nothing to observe. Pure numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pannier {

/// Remembers the last steps' course and says what is ahead in this one. One thread at a time.
class MemoryCurve {
 public:
  /// Ends the interval since the last tick, in which at most `peak_nbytes` were in use without what the asker itself
  /// has there, and begins the next, called `key`. Steps whose keys differ from the last one's are learnt anew.
  void tick(std::int64_t key, std::size_t peak_nbytes);
  /// Ends the step, whose last interval had `peak_nbytes`.
  void end_step(std::size_t peak_nbytes);

  /// The most that is expected from the last tick to the next. As long as the step is like no other: overall().
  [[nodiscard]] std::size_t until_next_tick() const;
  /// The most that is expected from the last tick to the end of the step.
  [[nodiscard]] std::size_t until_end() const;
  /// Whether the last tick began an interval of which the step's peak is expected.
  [[nodiscard]] bool peaks_until_next_tick() const;
  /// The most of a whole step: of the last one, or of this one so far where that is more.
  [[nodiscard]] std::size_t overall() const;
  /// What the last interval of the last step took, which is that of the update.
  [[nodiscard]] std::size_t at_end() const noexcept { return known_.empty() ? 0 : known_.back().peak_nbytes; }
  /// The most that is expected between the end of a step and the first tick of the next.
  [[nodiscard]] std::size_t until_first_tick() const noexcept { return known_before_first_; }
  /// Whether this step has, so far, the last one's ticks and takes no more than its peak.
  [[nodiscard]] bool is_like_last() const noexcept { return like_last_ && !seen_.empty(); }
  /// Whether a step has been seen.
  [[nodiscard]] bool is_known() const noexcept { return !known_.empty(); }

 private:
  struct Interval {
    std::int64_t key = 0;
    std::size_t peak_nbytes = 0;
  };
  void end_interval(std::size_t peak_nbytes);

  /// A long evaluation ticks without a step; what comes after so many ticks counts for the last of them.
  static constexpr std::size_t kMostTicks = std::size_t{1} << 16;

  std::vector<Interval> known_;          ///< The last step.
  std::vector<std::size_t> known_rest_;  ///< The most from each interval to the end of the last step.
  std::vector<Interval> seen_;           ///< This step so far; the last interval is open.
  std::size_t before_first_ = 0;         ///< The most before the first tick of this step.
  std::size_t known_before_first_ = 0;
  std::size_t known_overall_ = 0;
  std::size_t seen_overall_ = 0;
  bool like_last_ = true;  ///< The keys so far are those of the last step, and no peak is above its peak.
};

}  // namespace pannier
