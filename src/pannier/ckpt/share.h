// What one rank adds to a checkpoint: a safetensors file with its ranges of the tensors, and its own extra file. Ranks
// tell rank 0 by a text what they have written; from all of them it makes the manifest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pannier/ckpt/manifest.h"
#include "pannier/ckpt/safetensors_writer.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {

/// The beginning of the name of every file of a checkpoint but the manifest.
inline constexpr std::string_view kFilePrefix = "pannier-";

/// A name for one save.
[[nodiscard]] std::string new_save_name();
/// The name of a rank's file. `save` is unique to the save, so that no file of an older one is ever overwritten.
[[nodiscard]] std::string share_file_name(const std::string& save, int rank, std::string_view what);

/// A range of a tensor's elements to be written.
struct ShareEntry {
  std::string tensor;
  DType dtype = DType::kF32;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// What a rank has written.
struct Share {
  std::vector<ManifestFile> files = {};
  std::vector<ManifestShard> shards = {};
  std::vector<ManifestExtra> extras = {};
  /// Adds what another one has.
  void append(Share other);
  friend bool operator==(const Share&, const Share&) = default;
};

[[nodiscard]] std::string format_share(const Share& share);
/// Throws IoError naming `whose` share it is.
[[nodiscard]] Share parse_share(std::string_view text, const std::string& whose);

/// The checksum of all of a file, read in pieces.
[[nodiscard]] std::uint64_t file_checksum(const SealedFolder& folder, const std::string& file);

/// The part of [begin, end) that starts at `at` and shares one checksum: at most kChunkElements.
[[nodiscard]] std::int64_t chunk_end(std::int64_t at, std::int64_t end) noexcept;

/// Writes a rank's ranges one after the other, and sums their chunks up. The file is removed unless finish() returns.
/// One thread; `folder` must outlive it.
class ShareWriter {
 public:
  /// Entries without elements are left out. `mover`, where it is not null, takes the bytes and must outlive it. Throws
  /// IoError, ConfigError.
  ShareWriter(const SealedFolder& folder, std::string file, std::vector<ShareEntry> entries,
              FileMover* mover = nullptr);
  ~ShareWriter();
  ShareWriter(const ShareWriter&) = delete;
  ShareWriter& operator=(const ShareWriter&) = delete;

  /// The elements that follow, any number of them, but of one entry. Throws InternalError when there are not so many.
  void write(std::span<const std::byte> elements);
  /// Makes the file durable. A share without elements has no file.
  [[nodiscard]] Share finish();

 private:
  const SealedFolder& folder_;
  std::string file_;
  std::vector<ShareEntry> entries_;
  std::unique_ptr<SafetensorsWriter> writer_;  ///< Null where there are no elements.
  Share share_;
  ChecksumStream sum_;  ///< Of the chunk so far.
  std::size_t next_ = 0;
  std::int64_t at_ = 0;
};

/// A small tensor that a rank keeps for itself, whole.
struct ExtraTensor {
  TensorInfo info;
  std::span<const std::byte> bytes;
};

/// Writes a rank's extra file. Durable when it returns.
[[nodiscard]] Share write_extra(const SealedFolder& folder, const std::string& file, int rank,
                                const std::vector<ExtraTensor>& tensors);

}  // namespace pannier::ckpt
