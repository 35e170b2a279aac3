// The folder that a run saves into: one folder a tag, and `latest`, which names the tag to go on from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/manifest.h"
#include "pannier/ckpt/sealed_folder.h"
#include "pannier/ckpt/share.h"

namespace pannier::ckpt {

/// The file beside the tags that names the last one.
inline constexpr const char* kLatestName = "latest";

/// What is known of a tag without reading its data.
struct TagInfo {
  std::string tag;
  std::int64_t step = 0;
  std::uint64_t nbytes = 0;  ///< Of all its files.
  std::string problem = {};  ///< Why it is not complete; empty when it is.
  [[nodiscard]] bool is_complete() const noexcept { return problem.empty(); }
};

/// Looks after the tags. No save may be under way where something is removed. One thread.
class CheckpointFolder {
 public:
  /// Throws IoError when `path` is no folder.
  explicit CheckpointFolder(const std::string& path) : folder_(path) {}

  /// Every folder with a plain name, by name. Manifest, names and sizes of files are checked, not their data.
  [[nodiscard]] std::vector<TagInfo> tags() const;
  /// What `latest` says; nothing when there is none. Throws IoError when it holds no tag.
  [[nodiscard]] std::optional<std::string> latest() const;
  /// Writes `latest` at once and durably. Throws ConfigError or IoError unless the tag's manifest can be read.
  void set_latest(const std::string& tag) const;
  /// The complete tag with the highest step; of equal ones the one that `latest` names, else the last by name.
  [[nodiscard]] std::optional<std::string> newest_complete() const;
  /// Reads every byte of a tag in pieces; one sentence for each thing that is wrong. Empty: all is well.
  [[nodiscard]] std::vector<std::string> verify(const std::string& tag) const;
  /// Removes files of ours that the tag's manifest does not name: what older or broken saves left. Returns their names.
  std::vector<std::string> remove_leftovers(const std::string& tag) const;
  /// Removes all complete tags but the `keep` newest and the one that `latest` names, each by its manifest first.
  /// Incomplete ones stay: they may be saves under way. Returns what was removed. Throws ConfigError for keep < 1.
  std::vector<std::string> prune(int keep) const;

 private:
  SealedFolder folder_;
};

/// Makes a tag of whole tensors that come one after the other, without an engine: for imports. One thread.
class CheckpointBuilder {
 public:
  /// Makes the folders. `tensors` in the order in which they will come. Throws ConfigError, IoError.
  CheckpointBuilder(const std::string& folder, std::string tag, std::vector<TensorInfo> tensors);
  /// All bytes of the next tensor. Throws ConfigError where it has another size.
  void write(std::span<const std::byte> bytes);
  /// Makes the tag complete, and `latest` name it.
  void commit(std::int64_t step, std::map<std::string, std::string> attributes);

 private:
  CheckpointFolder parent_;
  SealedFolder folder_;
  std::string tag_;
  std::vector<TensorInfo> tensors_;
  std::unique_ptr<ShareWriter> writer_;
  std::size_t next_ = 0;
};

}  // namespace pannier::ckpt
