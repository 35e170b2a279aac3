// Compares a text over ranks through the store, before any tensor travels: ranks that differ in configuration, model or
// layout would run collectives that do not fit each other.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "pannier/comm/group_state.h"
#include "pannier/comm/key_value_store.h"

namespace pannier {

/// Shows where two texts differ first: one line of each, cut around the difference. Empty for equal texts.
[[nodiscard]] std::string first_difference(const std::string& text, const std::string& other, const std::string& whose,
                                           const std::string& whose_other);

/// Compares texts over ranks. One thread.
class Agreement {
 public:
  Agreement(std::unique_ptr<KeyValueStore> store, std::shared_ptr<GroupState> state, int rank, int world_size,
            std::chrono::milliseconds timeout, std::string prefix = "");
  /// Another one, for another thread, that meets those of the same name on other ranks.
  [[nodiscard]] Agreement beside(const std::string& name) const {
    return {store_->clone(), state_, rank_, world_size_, timeout_, name + "/"};
  }

  /// Returns when every rank has called this with the same `name` and `value`. Otherwise throws on every rank:
  /// ConfigError that names the first rank whose value is not rank 0's, and shows the first difference;
  /// CollectiveError that names the ranks which have not come before the deadline.
  void agree(const std::string& name, const std::string& value);
  /// Every rank's text, by rank, when all have called this with the same `name`. Otherwise throws CollectiveError that
  /// names the ranks which have not come before the deadline, or one that shares something else.
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& name, const std::string& text);

 private:
  /// Polls for a key until the deadline; throws CollectiveError when the group fails before, and returns whether it
  /// came.
  bool await(const std::string& key, std::string& value, GroupState::Clock::time_point deadline,
             const std::string& operation);
  void let_all_read(const std::string& prefix);
  [[nodiscard]] std::string judge(const std::string& prefix, const std::string& name, const std::string& value);

  std::unique_ptr<KeyValueStore> store_;
  std::shared_ptr<GroupState> state_;  ///< Shared with the group's threads.
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  std::string prefix_;  ///< Of its keys.
  int num_agreements_ = 0;
};

}  // namespace pannier
