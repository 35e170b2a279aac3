// A disk that fails on demand, for tests: given to an engine as its hook, it answers chosen pieces with an error, moves
// less than was asked for, lags, or flips a bit of what was read.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "pannier/io/piece_hook.h"

namespace pannier {

/// What goes wrong.
enum class FaultKind : std::uint8_t {
  kError,    ///< The piece is not moved; the answer is `error_number`.
  kShort,    ///< At most `nbytes` of the piece are moved.
  kDelay,    ///< The piece waits for `delay` first, and (as a disk that is busy does) those behind it.
  kFlipBit,  ///< Bit `bit` of what was read is another one. Reads only.
};

/// One rule: which pieces, and what happens to them.
struct Fault {
  FaultKind kind = FaultKind::kError;
  bool on_read = false;
  bool on_write = false;
  std::size_t skip = 0;                                         ///< Pieces that match and go well first.
  std::size_t times = std::numeric_limits<std::size_t>::max();  ///< Pieces that it then hits.
  int error_number = 5;                                         ///< For kError: an errno value; EIO.
  std::size_t nbytes = 0;                                       ///< For kShort.
  std::chrono::microseconds delay{0};                           ///< For kDelay.
  std::size_t bit = 0;                                          ///< For kFlipBit; counted in each piece.
};

/// Applies its rules in the order in which they were added. Thread-safe.
class FaultyDisk final : public PieceHook {
 public:
  /// Takes effect with the next piece.
  void add(const Fault& fault);
  /// The disk is well again.
  void clear();
  /// How often any rule has struck.
  [[nodiscard]] std::size_t num_hits() const;

  std::optional<int> before(IoAttempt& attempt) override;
  int after(const IoAttempt& attempt, int result) override;

 private:
  struct Rule {
    Fault fault;
    std::size_t seen = 0;
  };
  std::vector<Fault> strike(const IoAttempt& attempt, bool is_before);

  mutable std::mutex rules_mutex_;  ///< Guards everything below.
  std::vector<Rule> rules_;
  std::size_t num_hits_ = 0;
};

}  // namespace pannier
