// The files that one rank adds to a checkpoint: one with its ranges of the model, one for each state of the optimizer,
// so that all can be written and read from front to back together, and one with what it keeps for itself.
#pragma once

#include <string>

#include "pannier/ckpt/file_mover.h"
#include "pannier/ckpt/sealed_folder.h"
#include "pannier/ckpt/share.h"
#include "pannier/engine/frozen_pieces.h"
#include "pannier/engine/saved_contents.h"
#include "pannier/optim/state_snapshot.h"

namespace pannier {

/// Where they go.
struct RankFilesPlace {
  const ckpt::SealedFolder& folder;
  std::string save;  ///< Unique to this save.
  int rank = 0;
};

/// Writes them; durable on return. Of any thread. `snapshot` and `pieces` may be null, where nothing is trained;
/// `parts` then is too. Throws IoError, and ConfigError where somebody wrote into a parameter meanwhile.
[[nodiscard]] ckpt::Share write_rank_files(const RankFilesPlace& place, ckpt::FileMover& mover, Device& device,
                                           const Parts* parts, StateSnapshot* snapshot, FrozenPieces* pieces,
                                           const SavedContents& contents);
/// Removes what there is of them, or says that it can't.
void remove_rank_files(const RankFilesPlace& place) noexcept;

/// Bytes of their states.
[[nodiscard]] std::uint64_t rank_files_nbytes(const Parts& parts);

}  // namespace pannier
