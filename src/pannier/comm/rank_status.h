// Where a rank is, as its monitor publishes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pannier/comm/label.h"

namespace pannier {

/// One rank's line in the store.
struct RankStatus {
  std::uint64_t beat = 0;       ///< Changes with every publication.
  bool has_left = false;        ///< It closed its communicator.
  std::uint32_t num_begun = 0;  ///< Operations begun so far.
  Label label{};                ///< Of the last one.

  [[nodiscard]] std::string to_text() const;
  /// Nothing where `text` is not a status.
  [[nodiscard]] static std::optional<RankStatus> from_text(const std::string& text);
};

/// Says why operation number `sequence` of this rank does not go on because of rank `other`; empty where `status` shows
/// no reason. `status` is none where that rank has never published one.
[[nodiscard]] std::string reason_to_wait(int other, const std::optional<RankStatus>& status, std::uint32_t sequence,
                                         const Label& label);

}  // namespace pannier
