// The channel of a group whose ranks meet in a store.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pannier/comm/agreement.h"
#include "pannier/comm/communicator.h"

namespace pannier {

/// Shares texts through an agreement of its own. One thread.
class GroupChannel final : public TextChannel {
 public:
  explicit GroupChannel(Agreement agreement) : agreement_(std::move(agreement)) {}
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& name, const std::string& text) override {
    return agreement_.share_texts(name, text);
  }

 private:
  Agreement agreement_;
};

}  // namespace pannier
