// What a checkpoint consists of: the tensors of model and optimizer, and which file holds which of their elements.
// `manifest.json` is written last; its rename is the commit of the checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pannier/ckpt/sealed_folder.h"
#include "pannier/ckpt/tensor_info.h"

namespace pannier::ckpt {

/// The newest format that this version reads, and the one that it writes.
inline constexpr std::int64_t kManifestVersion = 1;
/// The manifest's name in the checkpoint's folder.
inline constexpr const char* kManifestName = "manifest.json";
/// Elements that share one checksum, counted from the tensor's start, so that a load of a range verifies what it reads.
inline constexpr std::int64_t kChunkElements = std::int64_t{1} << 20;

/// A file of the checkpoint.
struct ManifestFile {
  std::string name;  ///< Plain: no folder, see is_plain_name.
  std::uint64_t nbytes = 0;
  friend bool operator==(const ManifestFile&, const ManifestFile&) = default;
};

/// A range of a tensor's elements, held by a safetensors file as a flat tensor `key`.
struct ManifestShard {
  std::string file;
  std::string key;
  std::string tensor;
  std::int64_t begin = 0;                     ///< First element.
  std::int64_t end = 0;                       ///< One past the last; more than `begin`.
  std::vector<std::uint64_t> checksums = {};  ///< One for each chunk that the range touches: chunk_checksums().
  friend bool operator==(const ManifestShard&, const ManifestShard&) = default;
};

/// A file that one rank wrote for itself, such as the states of its random numbers.
struct ManifestExtra {
  int rank = 0;
  std::string file;
  std::uint64_t checksum = 0;  ///< pannier::checksum of all of it.
  friend bool operator==(const ManifestExtra&, const ManifestExtra&) = default;
};

/// The whole of it.
struct Manifest {
  std::int64_t step = 0;
  int world_size = 1;
  std::map<std::string, std::string> attributes = {};  ///< Whatever else the writer wants to know again.
  std::vector<TensorInfo> tensors = {};
  std::vector<ManifestFile> files = {};
  std::vector<ManifestShard> shards = {};
  std::vector<ManifestExtra> extras = {};

  /// Every element of every tensor in one shard exactly, every file listed once and used, names plain. Throws IoError
  /// naming `file` (the manifest), what is wrong, the values and what was expected.
  void validate(const std::string& file) const;
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// The chunks that a range of elements touches. An empty range touches none.
[[nodiscard]] std::size_t num_chunks(std::int64_t begin, std::int64_t end) noexcept;
/// The checksums of a range that starts at element `begin` of its tensor.
[[nodiscard]] std::vector<std::uint64_t> chunk_checksums(std::span<const std::byte> bytes, std::int64_t begin,
                                                         std::size_t element_nbytes);

/// Reads and validates. Throws IoError naming `file`; for a newer format before anything else is looked at.
[[nodiscard]] Manifest parse_manifest(std::string_view text, const std::string& file);
/// The text of a manifest, with a checksum of itself. Throws ConfigError for text that is not UTF-8.
[[nodiscard]] std::string format_manifest(const Manifest& manifest);
/// Reads the manifest of a checkpoint's folder.
[[nodiscard]] Manifest read_manifest(const SealedFolder& folder);
/// Validates, then commits: temporary file, fsync, rename, fsync of the folder. The files must be durable before.
void write_manifest(const SealedFolder& folder, const Manifest& manifest);

}  // namespace pannier::ckpt
