#include "pannier/ckpt/safetensors_reader.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "pannier/base/error.h"
#include "pannier/ckpt/strict_json.h"

namespace pannier::ckpt {

SafetensorsReader::SafetensorsReader(const std::string& path)
    : fd_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)), path_(path) {
  if (!fd_.is_open()) {
    throw IoError(fmt::format("open '{}'", path), errno);
  }
  read_header();
}

SafetensorsReader::SafetensorsReader(const SealedFolder& folder, const std::string& name)
    : fd_(folder.open_file(name)), path_(folder.path() + "/" + name) {
  read_header();
}

void SafetensorsReader::read_header() {
  std::array<std::byte, 8> length{};
  const std::uint64_t nbytes = regular_file_nbytes(fd_.get(), path_);
  if (nbytes < length.size()) {
    bad_content(path_, fmt::format("a file of {} bytes is too short for a header", nbytes));
  }
  read_exactly(fd_.get(), length, 0, path_);
  std::uint64_t header_nbytes = 0;
  for (std::size_t i = 0; i < length.size(); ++i) {
    header_nbytes |= static_cast<std::uint64_t>(length[i]) << (8 * i);
  }
  if (header_nbytes > nbytes - length.size() || header_nbytes > kMaxSafetensorsHeaderBytes) {
    bad_content(path_, fmt::format("header length {}: at most {} were expected in a file of {} bytes", header_nbytes,
                                   std::min(nbytes - length.size(), kMaxSafetensorsHeaderBytes), nbytes));
  }
  std::string text(header_nbytes, '\0');
  read_exactly(fd_.get(), std::as_writable_bytes(std::span(text)), length.size(), path_);
  data_offset_ = length.size() + header_nbytes;
  header_ = parse_safetensors_header(text, nbytes - data_offset_, path_);
  for (std::size_t i = 0; i < header_.entries.size(); ++i) {
    index_[header_.entries[i].info.name] = i;
  }
}

const SafetensorsEntry* SafetensorsReader::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

void SafetensorsReader::read(const std::string& name, std::int64_t begin_element, std::span<std::byte> bytes) const {
  const SafetensorsEntry* entry = find(name);
  if (entry == nullptr) {
    throw ConfigError(fmt::format("'{}': no tensor '{}'", path_, name));
  }
  const std::size_t element = dtype_nbytes(entry->info.dtype);
  if (begin_element < 0 || begin_element > entry->numel || bytes.size() % element != 0 ||
      bytes.size() / element > static_cast<std::uint64_t>(entry->numel - begin_element)) {
    throw ConfigError(fmt::format("'{}': {} bytes from element {} are not within tensor '{}' of {} elements", path_,
                                  bytes.size(), begin_element, name, entry->numel));
  }
  read_exactly(fd_.get(), bytes, offset_of(*entry, begin_element), path_);
}

}  // namespace pannier::ckpt
