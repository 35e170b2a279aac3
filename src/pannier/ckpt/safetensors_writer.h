// Writes a safetensors file as its data comes: all names, types and shapes first, then the bytes in their order, in
// pieces of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/packed_file.h"
#include "pannier/ckpt/safetensors_header.h"
#include "pannier/ckpt/sealed_folder.h"

namespace pannier::ckpt {

/// Options of SafetensorsWriter.
struct SafetensorsWriterOptions {
  std::map<std::string, std::string> metadata = {};  ///< Becomes `__metadata__`.
  std::size_t data_alignment = 8;                    ///< The data starts at a multiple of this, itself one of 8.
  bool rename_at_end = true;   ///< Write under "NAME.partial" and rename in finish(); false: under the name at once.
  FileMover* mover = nullptr;  ///< Takes the bytes past the page cache; must outlive the writer. Null: for small files.
};

/// One file being written. Unless finish() returns, its destructor removes what was written. One thread. Not movable:
/// `folder` must outlive it.
class SafetensorsWriter {
 public:
  /// Writes the header. Throws ConfigError for names or shapes that cannot be, IoError when the disk refuses.
  SafetensorsWriter(const SealedFolder& folder, const std::string& name, const std::vector<TensorInfo>& tensors,
                    const SafetensorsWriterOptions& options = {});
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();

  /// Writes elements of tensor `index` from `begin_element` on. Throws ConfigError naming what was expected unless they
  /// follow what was written last.
  void write(std::size_t index, std::int64_t begin_element, std::span<const std::byte> bytes);
  /// Syncs the file, then renames it and syncs the folder if that was asked for. Throws ConfigError naming the tensor
  /// that is incomplete.
  void finish();
  /// Bytes of the whole file, header included.
  [[nodiscard]] std::uint64_t file_nbytes() const noexcept;

 private:
  void append(std::span<const std::byte> bytes);
  [[nodiscard]] std::uint64_t data_nbytes() const noexcept;

  const SealedFolder& folder_;
  std::string name_;
  std::string written_name_;
  SafetensorsHeader header_;
  OwnedFd fd_;                          ///< Without a mover.
  std::unique_ptr<PackedFile> packed_;  ///< With one.
  std::uint64_t data_offset_ = 0;
  std::uint64_t at_ = 0;  ///< Bytes of data that have come.
  bool is_finished_ = false;
};

}  // namespace pannier::ckpt
