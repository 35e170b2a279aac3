// Messages between ranks that are threads of one process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "pannier/comm/group_state.h"
#include "pannier/comm/label.h"

namespace pannier {

/// A message, copied when it was sent. Header and no bytes: the sender had none for this rank.
struct Letter {
  MessageHeader header;
  std::vector<std::byte> bytes;
};

/// What has come for one rank and was not taken yet. Thread-safe.
class Mailbox {
 public:
  /// `state` is the receiving rank's, whose waiters each letter wakes.
  explicit Mailbox(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  void post(std::uint32_t sequence, int source, Letter letter);
  /// Whether the letter is there. Called under the state's lock.
  [[nodiscard]] bool has(std::uint32_t sequence, int source) const;
  /// Takes a letter that is there.
  [[nodiscard]] Letter take(std::uint32_t sequence, int source);

 private:
  std::shared_ptr<GroupState> state_;                        ///< Shared with the rank's communicator.
  std::map<std::pair<std::uint32_t, int>, Letter> letters_;  ///< Guarded by the state's lock.
};

}  // namespace pannier
