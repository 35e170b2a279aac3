// A group whose ranks are threads of one process, for tests: the same communicator, over mailboxes and a store in
// memory.
#pragma once

#include <memory>
#include <vector>

#include "pannier/comm/communicator.h"
#include "pannier/comm/group_options.h"
#include "pannier/comm/key_value_store.h"

namespace pannier {

/// Polls often, since it costs nothing here.
[[nodiscard]] GroupOptions thread_group_options();

/// Makes one communicator for each rank. The group closes them when it ends; no thread may use one then.
class ThreadGroup {
 public:
  explicit ThreadGroup(int world_size, const GroupOptions& options = thread_group_options());
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  [[nodiscard]] Communicator& communicator(int rank) { return *communicators_.at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] int world_size() const noexcept { return static_cast<int>(communicators_.size()); }

 private:
  MemoryStore store_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

}  // namespace pannier
