#include "pannier/comm/rank_status.h"

#include <fmt/format.h>

#include <sstream>

namespace pannier {

std::string RankStatus::to_text() const {
  return fmt::format("{} {} {} {} {} {}", beat, has_left ? 1 : 0, num_begun, static_cast<int>(label.kind), label.step,
                     label.unit);
}

std::optional<RankStatus> RankStatus::from_text(const std::string& text) {
  std::istringstream words(text);
  RankStatus status;
  std::uint16_t kind = 0;
  words >> status.beat >> status.has_left >> status.num_begun >> kind >> status.label.step >> status.label.unit;
  status.label.kind = static_cast<OperationKind>(kind);
  return words ? std::optional(status) : std::nullopt;
}

std::string reason_to_wait(int other, const std::optional<RankStatus>& status, std::uint32_t sequence,
                           const Label& label) {
  if (!status) {
    return fmt::format("rank {} has not been seen at all", other);
  }
  const std::string last_seen = status->num_begun == 0 ? "no operation yet" : describe(status->label);
  if (status->num_begun <= sequence) {
    const char* what = status->has_left ? "left the group without" : "has not reached";
    return fmt::format("rank {} {} {} (last seen: {})", other, what, describe(label), last_seen);
  }
  if (status->num_begun == sequence + 1 && status->label != label) {
    return fmt::format("rank {} is in {} instead of {} (operation {})", other, last_seen, describe(label), sequence);
  }
  return {};
}

}  // namespace pannier
