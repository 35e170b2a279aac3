// Saves what an engine holds. Every rank writes its own share of the tensors, and nothing is gathered:
//  1. Ranks agree on the tag and on the name of this save, which is part of every file's name, and copy small things.
//  2. A thread of each writes its ranges of the trained parameters and their states, some of the rest, and an extra
//     file, while the engine may go on: no state is updated before it was read (optim/state_snapshot).
//  3. Each tells rank 0 what it has written, with checksums. All of it is durable by then.
//  4. Rank 0 renames the manifest into place, which is the commit, then `latest`; then it removes what older saves
//     left.
//  5. All have ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pannier/ckpt/sealed_folder.h"
#include "pannier/ckpt/share.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/engine/config_parts.h"
#include "pannier/engine/frozen_pieces.h"
#include "pannier/engine/rank_files.h"
#include "pannier/engine/saved_contents.h"
#include "pannier/mem/host_memory.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// What a save works on. Everything must outlive it.
struct SaveParts {
  Device& device;
  Communicator& ranks;
  HostMemory& memory;
  Parts* parts = nullptr;  ///< Null: an engine that trains nothing.
};

/// How to save.
struct SaveOptions {
  TagValidation validation = TagValidation::kWarn;
  std::uint64_t delay_seed = 0;  ///< Not 0: random pauses in the thread.
};

/// One save, from the call to its end. Of the engine's thread.
class CheckpointSave {
 public:
  /// All ranks begin one while everything is at rest. `attributes` and `step`: the engine's own, beside those of
  /// `contents`. Throws on every rank where they do not agree; what fails later is told by finish().
  CheckpointSave(const SaveParts& parts, const SaveOptions& options, const SavePlace& place,
                 const CheckpointContents& contents, std::int64_t step,
                 const std::map<std::string, std::string>& attributes);
  /// Waits for its end.
  ~CheckpointSave();
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  /// The tag's folder.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Whether finish() will not wait.
  [[nodiscard]] bool has_ended() const noexcept { return has_ended_; }
  /// Waits until the checkpoint is durable. Throws on every rank where one failed; what was there before is unharmed
  /// then.
  void finish();
  /// Null where nothing is trained.
  [[nodiscard]] StateSnapshot* snapshot() noexcept { return snapshot_.get(); }
  /// Waits until nothing is left to be read of states and parameters.
  void wait_read() noexcept;

 private:
  void agree(const CheckpointContents& contents);
  [[nodiscard]] std::string choose_tag(const std::vector<std::string>& tags) const;
  void prepare(const CheckpointContents& contents);
  void work() noexcept;
  void write_and_commit();
  void commit(const std::vector<std::string>& shares);

  SaveParts parts_;
  SaveOptions options_;
  SavePlace place_;
  std::string save_;  ///< Its name.
  std::string path_;
  std::optional<ckpt::SealedFolderLock> lock_;  ///< Rank 0's, of the tag's folder.
  std::vector<std::uint64_t> buffer_sums_;      ///< Rank 0's.
  SavedContents contents_;
  std::unique_ptr<TextChannel> channel_;
  HostMemory spare_;  ///< For a few small buffers where the account has no room.
  std::unique_ptr<ckpt::FileMover> mover_;
  std::unique_ptr<StateSnapshot> snapshot_;
  std::unique_ptr<FrozenPieces> pieces_;  ///< Null where there are none.
  std::atomic<bool> is_read_ = false;
  std::exception_ptr unprepared_;
  std::exception_ptr failed_;
  std::atomic<bool> has_ended_ = false;
  std::thread thread_;
};

}  // namespace pannier
