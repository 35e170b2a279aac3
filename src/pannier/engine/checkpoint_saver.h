// Saves what an engine holds. Every rank writes its own share of the tensors, and nothing is gathered:
//  1. Ranks agree on the tag and on the name of this save, which is part of every file's name.
//  2. Each writes its ranges of the trained parameters and their states, some of the rest, and an extra file.
//  3. Each tells rank 0 what it has written, with checksums. All of it is durable by then.
//  4. Rank 0 renames the manifest into place, which is the commit, then `latest`; then it removes what older saves
//  left.
//  5. All return.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "pannier/ckpt/share.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/engine/config_parts.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// Saves once. Of the engine's thread; everything must be at rest meanwhile.
class CheckpointSaver {
 public:
  /// `parts` may be null: an engine that trains nothing. What it refers to must outlive it.
  CheckpointSaver(Device& device, Communicator& ranks, Parts* parts, TagValidation validation)
      : device_(device), ranks_(ranks), parts_(parts), validation_(validation) {}

  /// All ranks call it. `step` and `attributes`: the engine's own. Returns the path of the tag's folder when the
  /// checkpoint is durable. Throws on every rank where one failed; what was there before is unharmed then.
  std::string save(const SavePlace& place, const CheckpointContents& contents, std::int64_t step,
                   const std::map<std::string, std::string>& attributes);

 private:
  struct Agreed {
    std::string tag;
    std::string save;                        ///< Unique to this save.
    std::vector<std::uint64_t> buffer_sums;  ///< Rank 0's.
  };

  void remove_own(const std::string& path, const Agreed& agreed) const;
  [[nodiscard]] Agreed agree(const SavePlace& place, const CheckpointContents& contents);
  [[nodiscard]] std::string choose_tag(const std::vector<std::string>& tags) const;
  [[nodiscard]] ckpt::Share write_share(const ckpt::SealedFolder& folder, const CheckpointContents& contents,
                                        const Agreed& agreed);
  void write_parameters(ckpt::ShareWriter& writer);
  void write_tensor(ckpt::ShareWriter& writer, const NamedTensor& named);
  [[nodiscard]] ckpt::Share write_extras(const ckpt::SealedFolder& folder, const CheckpointContents& contents,
                                         const Agreed& agreed);
  [[nodiscard]] std::vector<ckpt::ShareEntry> trained_entries() const;
  [[nodiscard]] std::vector<NamedTensor> own_untrained(const CheckpointContents& contents) const;
  [[nodiscard]] ckpt::Manifest manifest_of(const CheckpointContents& contents, ckpt::Share written) const;
  [[nodiscard]] std::uint64_t sum_of(const at::Tensor& tensor);

  Device& device_;
  Communicator& ranks_;
  Parts* parts_;
  TagValidation validation_;
  std::vector<std::byte> chunk_;
};

}  // namespace pannier
