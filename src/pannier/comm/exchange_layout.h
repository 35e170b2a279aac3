// How the messages of one exchange lie in a flat buffer: pure integers. A message is its payload, padded to 16 bytes so
// that every piece is aligned, and a stamp of 16 bytes; a piece without bytes has no message and no stamp.
#pragma once

#include <cstdint>
#include <vector>

namespace pannier {

inline constexpr std::int64_t kStampNbytes = 16;
inline constexpr std::int64_t kMessageAlignment = 16;

/// Bytes of a message with a payload of `payload_nbytes`: payload, padding and stamp; 0 without payload.
[[nodiscard]] std::int64_t message_nbytes(std::int64_t payload_nbytes);

/// Whether the piece that a rank sends to itself, which never travels, has a place in the flat buffer.
enum class OwnPiece { kLeftOut, kKept };

/// One direction of an exchange: for each rank the piece sent to it, or received from it, in rank order.
class ExchangeLayout {
 public:
  /// `payload_nbytes` has one size for each rank, zero allowed. Throws InternalError for negative sizes or a rank that
  /// is none of them.
  ExchangeLayout(int own_rank, std::vector<std::int64_t> payload_nbytes, OwnPiece own = OwnPiece::kLeftOut);

  [[nodiscard]] int own_rank() const noexcept { return own_rank_; }
  [[nodiscard]] int world_size() const noexcept { return static_cast<int>(payloads_.size()); }
  /// Payload in the buffer for this rank; 0 for an own piece that was left out.
  [[nodiscard]] std::int64_t payload_nbytes(int rank) const;
  /// Bytes that travel to or from this rank: 0 for an own piece, which has no stamp either.
  [[nodiscard]] std::int64_t message_nbytes(int rank) const;
  /// Where the piece begins in the flat buffer; a multiple of 16.
  [[nodiscard]] std::int64_t offset(int rank) const;
  /// Size of the flat buffer.
  [[nodiscard]] std::int64_t total_nbytes() const noexcept { return total_nbytes_; }
  /// Stamps and padding among the bytes that travel.
  [[nodiscard]] std::int64_t overhead_nbytes() const;

 private:
  int own_rank_;
  std::vector<std::int64_t> payloads_;
  std::vector<std::int64_t> offsets_;
  std::int64_t total_nbytes_ = 0;
};

}  // namespace pannier
