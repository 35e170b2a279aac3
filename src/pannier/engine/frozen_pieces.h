// Frozen parameters that are partitioned, in checkpoints: each rank writes the pieces that it keeps, from where they
// rest, and reads those that it will keep. Small ones stay whole, and are saved as the model's buffers are.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/verified_reads.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/mem/host_slab.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// The partitioned ones among `frozen`, as the parts number them: by their buckets. `parts` may be null.
[[nodiscard]] std::vector<int> partitioned_of(const Parts* parts, const std::vector<NamedTensor>& frozen);
/// The others of them.
[[nodiscard]] std::vector<NamedTensor> whole_of(const Parts* parts, const std::vector<NamedTensor>& frozen);
/// What a checkpoint's manifest says of these parameters.
void describe_frozen(const Parts& parts, const std::vector<int>& parameters, ckpt::Manifest& manifest);

/// This rank's pieces of frozen parameters, for another thread than the engine's to read. Nobody may write into the
/// parameters until it has.
class FrozenPieces {
 public:
  /// Everything rests. What it refers to must outlive it. Throws OutOfMemoryError.
  FrozenPieces(Device& device, HostMemory& memory, Parts& parts, const std::vector<int>& parameters);

  /// What a file holds of them.
  [[nodiscard]] std::vector<ckpt::ShareEntry> entries() const;
  /// Gives their bytes out, in that order and in runs that end where an entry does. Throws IoError.
  void visit(const std::function<void(std::span<const std::byte>)>& use);
  [[nodiscard]] std::size_t nbytes() const noexcept;

 private:
  struct Source {
    ShardPiece piece;
    int bucket = 0;
    at::ScalarType dtype = at::kFloat;
    const std::byte* in_memory = nullptr;  ///< Where it rests; null: on the disk.
    bool is_on_device = false;
    [[nodiscard]] std::size_t width() const { return c10::elementSize(dtype); }
    [[nodiscard]] std::size_t nbytes() const { return nbytes_of(piece.numel, width()); }
  };
  void visit_memory(const Source& source, const std::function<void(std::span<const std::byte>)>& use);
  void visit_disk(const Source& source, const std::function<void(std::span<const std::byte>)>& use);

  Device& device_;
  Parts& parts_;
  std::vector<Source> sources_;
  std::vector<at::Tensor> kept_;  ///< Shards on the device.
  HostSlab chunk_;                ///< For one from the disk.
  std::vector<std::byte> part_;
};

/// Reads pieces of frozen parameters from a checkpoint. All of it on the engine's thread.
class FrozenLoading {
 public:
  /// `stored_name`: the name under which the checkpoint has a parameter's. What it refers to must outlive it.
  FrozenLoading(Device& device, ckpt::CheckpointReader& reader, Parts& parts, std::vector<int> parameters,
                std::function<std::string(const std::string&)> stored_name);

  /// What is to be read in runs, in the order in which load() asks.
  [[nodiscard]] std::vector<ckpt::TensorRun> runs() const;
  /// What was there rests; what the checkpoint does not have stays as it is. Throws IoError.
  void load(ckpt::VerifiedReads& reads);

 private:
  template <class Use>
  void for_each_piece(const Use& use) const;
  [[nodiscard]] std::string tensor_of(int parameter) const;
  [[nodiscard]] bool is_in_runs(int parameter) const;
  [[nodiscard]] at::Tensor turned(int parameter) const;
  void read_into(int parameter, const ShardPiece& piece, ckpt::VerifiedReads& reads,
                 const std::function<void(std::size_t offset, std::span<const std::byte>)>& write);

  Device& device_;
  ckpt::CheckpointReader& reader_;
  Parts& parts_;
  std::vector<int> parameters_;
  std::function<std::string(const std::string&)> stored_name_;
};

}  // namespace pannier
