// Loads a checkpoint of any world size, stage, home and type into an engine. Every rank reads the element ranges that
// it owns, and checks them; then ranks exchange the parameters that rest whole.
//  1. Ranks open the checkpoint and compare what they see, and names and shapes are held against the model's. Until
//     here nothing has changed.
//  2. Each rank reads.
//  3. When all have read, ranks exchange parameters.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/verified_reads.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/mem/host_memory.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// Loads once. Of the engine's thread.
class CheckpointLoader {
 public:
  /// `parts` may be null: an engine that trains nothing; `optimizer` is the name of its update as checkpoints have it.
  /// What it refers to must outlive it.
  CheckpointLoader(Device& device, Communicator& ranks, HostMemory& memory, Parts* parts, std::string optimizer)
      : device_(device), ranks_(ranks), memory_(memory), parts_(parts), optimizer_(std::move(optimizer)) {}

  /// Step 1. All ranks call it. Nothing where the folder has no `latest` and no tag was asked for. Throws, on all ranks
  /// where one failed, for what is missing, broken or of another model.
  [[nodiscard]] std::optional<LoadedCheckpoint> open(const LoadRequest& request);
  /// Steps 2 and 3, after open(). Throws on all ranks where one failed; the engine then holds a mixture.
  void load(const LoadRequest& request, LoadedCheckpoint& loaded);

 private:
  [[nodiscard]] std::string tag_of(const LoadRequest& request) const;
  void compare_names(const LoadRequest& request, LoadedCheckpoint& loaded);
  void compare_optimizers() const;
  void compare_groups(const LoadRequest& request) const;
  void compare_schedules(const LoadRequest& request) const;
  void compare_states(const LoadRequest& request, LoadedCheckpoint& loaded);
  [[nodiscard]] bool wants_states(const LoadRequest& request) const;
  [[nodiscard]] std::string stored_name(const std::string& name) const;
  void require_shape(const std::string& tensor, const std::string& name, int parameter) const;
  void read_all(const LoadRequest& request);
  [[nodiscard]] bool is_in_runs(const NamedTensor& named) const;
  void load_in_runs(const NamedTensor& named, ckpt::VerifiedReads& reads);
  void load_tensor(const NamedTensor& named);
  void load_extras(const LoadRequest& request, LoadedCheckpoint& loaded);

  Device& device_;
  Communicator& ranks_;
  HostMemory& memory_;
  Parts* parts_;
  std::string optimizer_;
  std::unique_ptr<ckpt::CheckpointReader> reader_;
};

}  // namespace pannier
