// Random pauses that shake races out: a thread of ours that sleeps a while before each piece of its work meets the
// others at other places in each run of a test.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace pannier {

/// Sleeps up to two milliseconds a call, by a small generator of its own (xorshift), so that a seed gives one sequence.
/// One thread.
class RandomDelay {
 public:
  /// 0: never sleeps.
  explicit RandomDelay(std::uint64_t seed) : state_(seed) {}
  void operator()() {
    if (state_ == 0) {
      return;
    }
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    std::this_thread::sleep_for(std::chrono::microseconds(state_ % 2000));
  }

 private:
  std::uint64_t state_;
};

}  // namespace pannier
