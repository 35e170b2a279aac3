#include "pannier/comm/label.h"

#include <fmt/format.h>

#include <bit>

namespace pannier {

std::string describe(const Label& label) {
  switch (label.kind) {
    case OperationKind::kGradients:
      return fmt::format("gradient exchange of bucket {}, step {}", label.unit, label.step);
    case OperationKind::kParameters:
      return fmt::format("parameter gather of bucket {}, step {}", label.unit, label.step);
    case OperationKind::kVotes:
      return fmt::format("sum of votes {}", label.step);
    case OperationKind::kOther:
      return fmt::format("other exchange {}, step {}", label.unit, label.step);
    case OperationKind::kBetweenNodes:
      return fmt::format("parameter exchange between nodes of bucket {}, step {}", label.unit, label.step);
  }
  return fmt::format("operation of unknown kind {}", static_cast<int>(label.kind));
}

Label Stamp::label() const { return {static_cast<OperationKind>(kind), step, unit}; }

std::array<std::int64_t, 2> Stamp::words() const { return std::bit_cast<std::array<std::int64_t, 2>>(*this); }

Stamp make_stamp(const Label& label, int source, std::uint32_t sequence) {
  return {.kind = static_cast<std::uint16_t>(label.kind),
          .source = static_cast<std::uint16_t>(source),
          .step = label.step,
          .unit = label.unit,
          .sequence = sequence};
}

std::string difference(const MessageHeader& expected, const MessageHeader& got, int rank) {
  const int source = expected.stamp.source;
  if (got.stamp.label() != expected.stamp.label()) {
    return fmt::format("the ranks are in different operations: rank {} is in {}, rank {} is in {} (operation {})",
                       source, describe(got.stamp.label()), rank, describe(expected.stamp.label()),
                       expected.stamp.sequence);
  }
  if (got.stamp != expected.stamp) {
    return fmt::format("a message of rank {} (operation {}) reached rank {} as rank {}'s (operation {}) in {}",
                       got.stamp.source, got.stamp.sequence, rank, source, expected.stamp.sequence,
                       describe(expected.stamp.label()));
  }
  if (got.nbytes != expected.nbytes) {
    return fmt::format("rank {} sends {} bytes in {}, rank {} expects {}", source, got.nbytes,
                       describe(expected.stamp.label()), rank, expected.nbytes);
  }
  return {};
}

}  // namespace pannier
