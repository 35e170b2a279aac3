// What a collective operation is for, in words and in numbers. A Label travels with every operation, so that errors can
// say which exchange a rank is in, and as a Stamp at the end of every message, so that two ranks which run different
// operations against each other notice (equal sizes alone would give half of one and half of the other).
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace pannier {

/// What the bytes of an operation are.
enum class OperationKind : std::uint16_t { kGradients = 0, kParameters = 1, kVotes = 2, kOther = 3, kBetweenNodes = 4 };
inline constexpr int kNumOperationKinds = 5;

/// Names one operation of a step; equal on every rank.
struct Label {
  OperationKind kind = OperationKind::kOther;
  std::uint32_t step = 0;
  std::int32_t unit = 0;  ///< The bucket or unit.

  bool operator==(const Label&) const = default;
};

/// For example "gradient exchange of bucket 3, step 17".
[[nodiscard]] std::string describe(const Label& label);

/// The last 16 bytes of every message.
struct Stamp {
  std::uint16_t kind = 0;
  std::uint16_t source = 0;  ///< The rank that sends.
  std::uint32_t step = 0;
  std::int32_t unit = 0;
  std::uint32_t sequence = 0;  ///< Operations of this group before this one, on the sender.

  bool operator==(const Stamp&) const = default;
  [[nodiscard]] Label label() const;
  /// The stamp's bytes as two integers, as a device writes and compares them.
  [[nodiscard]] std::array<std::int64_t, 2> words() const;
};
static_assert(sizeof(Stamp) == 16);

[[nodiscard]] Stamp make_stamp(const Label& label, int source, std::uint32_t sequence);

/// Goes ahead of a message where the transport cannot tell its size or purpose, so that nothing is received into a
/// buffer that was meant for something else.
struct MessageHeader {
  Stamp stamp;
  std::int64_t nbytes = 0;  ///< Of the message that follows, its stamp included; 0 where none follows.
};
static_assert(sizeof(MessageHeader) == 24);

/// Says how what came from a rank differs from what `rank` expected; empty where it does not.
[[nodiscard]] std::string difference(const MessageHeader& expected, const MessageHeader& got, int rank);

}  // namespace pannier
