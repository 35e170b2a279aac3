// Reads a checkpoint by tensor and element range, whatever ranks wrote it, and checks every byte that it gives out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/manifest.h"
#include "pannier/ckpt/safetensors_reader.h"
#include "pannier/ckpt/sealed_folder.h"

namespace pannier::ckpt {

/// Throws IoError naming the first file of a checkpoint that is missing or has another size than the manifest says.
void check_sizes(const SealedFolder& folder, const Manifest& manifest);

/// One tag's folder, opened. One thread.
class CheckpointReader {
 public:
  /// Reads the manifest and looks at the size of every file. Throws IoError naming what is wrong.
  explicit CheckpointReader(SealedFolder folder);
  CheckpointReader(CheckpointReader&&) = default;
  CheckpointReader& operator=(CheckpointReader&&) = default;
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }
  [[nodiscard]] const std::string& path() const noexcept { return folder_.path(); }
  [[nodiscard]] const SealedFolder& folder() const noexcept { return folder_; }
  /// The shards that hold a tensor's elements, in their order; none of a tensor without elements.
  [[nodiscard]] const std::vector<const ManifestShard*>& shards(const std::string& tensor) { return shards_[tensor]; }
  /// Where a shard's element is in its file, in bytes. Throws IoError where the file has another tensor in its place.
  [[nodiscard]] std::uint64_t file_offset(const ManifestShard& shard, std::int64_t element);
  /// Null where the checkpoint has no such tensor.
  [[nodiscard]] const TensorInfo* find(const std::string& tensor) const;
  /// The attribute's text; `otherwise` where there is none.
  [[nodiscard]] std::string attribute(const std::string& key, const std::string& otherwise = "") const;
  /// Reads the elements from `begin` on that fill `bytes`, in the tensor's own type. Throws ConfigError where there are
  /// none; IoError naming file, tensor and elements where the disk fails or a checksum is wrong.
  void read(const std::string& tensor, std::int64_t begin, std::span<std::byte> bytes);
  /// A rank's extra file, checked; null where it wrote none.
  [[nodiscard]] std::unique_ptr<SafetensorsReader> extra(int rank);

 private:
  const SafetensorsReader& reader_of(const ManifestShard& shard, const TensorInfo& info);
  void read_shard(const ManifestShard& shard, const TensorInfo& info, std::int64_t begin, std::span<std::byte> bytes);

  SealedFolder folder_;
  Manifest manifest_;
  std::map<std::string, const TensorInfo*> tensors_;
  std::map<std::string, std::vector<const ManifestShard*>> shards_;  ///< By tensor, in order.
  std::map<std::string, std::unique_ptr<SafetensorsReader>> readers_;
  std::vector<std::byte> chunk_;
};

}  // namespace pannier::ckpt
