// Reads a safetensors file by element ranges. Only the header is in memory, so the file may be of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "pannier/ckpt/safetensors_header.h"
#include "pannier/ckpt/sealed_folder.h"

namespace pannier::ckpt {

/// An open file whose header was checked in full. Move-only; const functions are thread-safe.
class SafetensorsReader {
 public:
  /// Throws IoError naming file, tensor, value and what was expected when the file is not as the format demands.
  explicit SafetensorsReader(const std::string& path);
  /// Reads the file `name` of a folder, following no link.
  SafetensorsReader(const SealedFolder& folder, const std::string& name);

  /// In the order of their bytes.
  [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const noexcept { return header_.entries; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return header_.metadata; }
  /// Null when there is none of that name.
  [[nodiscard]] const SafetensorsEntry* find(const std::string& name) const;
  /// Where an element of one is in the file, in bytes.
  [[nodiscard]] std::uint64_t offset_of(const SafetensorsEntry& entry, std::int64_t element) const noexcept {
    return data_offset_ + entry.begin + static_cast<std::uint64_t>(element) * dtype_nbytes(entry.info.dtype);
  }
  /// Reads elements from `begin_element` on, as many as fit `bytes` (whole elements). Throws ConfigError when tensor or
  /// range do not exist; IoError when the disk fails.
  void read(const std::string& name, std::int64_t begin_element, std::span<std::byte> bytes) const;

 private:
  void read_header();

  OwnedFd fd_;
  std::string path_;
  SafetensorsHeader header_;
  std::map<std::string, std::size_t> index_;
  std::uint64_t data_offset_ = 0;
};

}  // namespace pannier::ckpt
