// Loads a checkpoint of any world size, stage, home and type into an engine. Every rank reads the element ranges that
// it owns, and checks them; then ranks exchange the parameters that rest whole.
//  1. Ranks open the checkpoint and compare what they see, and names and shapes are held against the model's. Until
//     here nothing has changed.
//  2. Each rank reads.
//  3. When all have read, ranks exchange parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// A tensor of the checkpoint, in the memory order of a parameter, as fp32.
class StoredValues {
 public:
  /// Throws ConfigError where the shape is not the parameter's. `order`: of the parameter in memory.
  StoredValues(ckpt::CheckpointReader& reader, std::string tensor, const std::string& stored_order,
               at::IntArrayRef sizes, const std::vector<std::int64_t>& order);
  /// Elements from `begin` on.
  void read(std::int64_t begin, std::span<float> values);

 private:
  void turn(const std::vector<std::int64_t>& from, at::IntArrayRef sizes, const std::vector<std::int64_t>& to);

  ckpt::CheckpointReader& reader_;
  std::string tensor_;
  at::ScalarType type_;
  std::vector<std::byte> bytes_;
  std::vector<float> turned_;  ///< All of it, where the memory orders differ.
};

/// Loads once. Of the engine's thread.
class CheckpointLoader {
 public:
  /// `parts` may be null: an engine that trains nothing. What it refers to must outlive it.
  CheckpointLoader(Device& device, Communicator& ranks, Parts* parts) : device_(device), ranks_(ranks), parts_(parts) {}

  /// Step 1. All ranks call it. Nothing where the folder has no `latest` and no tag was asked for. Throws, on all ranks
  /// where one failed, for what is missing, broken or of another model.
  [[nodiscard]] std::optional<LoadedCheckpoint> open(const LoadRequest& request);
  /// Steps 2 and 3, after open(). Throws on all ranks where one failed; the engine then holds a mixture.
  void load(const LoadRequest& request, LoadedCheckpoint& loaded);

 private:
  [[nodiscard]] std::string tag_of(const LoadRequest& request) const;
  void compare_names(const LoadRequest& request, LoadedCheckpoint& loaded);
  void compare_states(const LoadRequest& request, LoadedCheckpoint& loaded);
  [[nodiscard]] bool wants_states(const LoadRequest& request) const;
  [[nodiscard]] std::string stored_name(const std::string& name) const;
  [[nodiscard]] StoredValues values_of(const std::string& tensor, const std::string& name, int parameter);
  void load_parameters(const LoadRequest& request);
  void load_piece(class BucketStates& states, const ShardPiece& piece, const std::string& name,
                  const std::string& tensor);
  void load_tensor(const NamedTensor& named);
  void load_extras(const LoadRequest& request, LoadedCheckpoint& loaded);
  [[nodiscard]] float initial_value(const std::string& state) const;

  Device& device_;
  Communicator& ranks_;
  Parts* parts_;
  std::unique_ptr<ckpt::CheckpointReader> reader_;
};

}  // namespace pannier
