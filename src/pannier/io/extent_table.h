// Which bytes of the scratch file belong to what: extents one after the other, in the order in which a step visits
// them, so that a step reads and writes the disk from front to back. Pure arithmetic; it says how large the file must
// be before there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pannier {

/// A run of bytes that is read and written as a whole.
struct Extent {
  std::string label;         ///< What rests here, for messages: a parameter's name, say.
  std::uint64_t offset = 0;  ///< A multiple of kIoAlignment.
  std::size_t nbytes = 0;    ///< Any size, 0 too.
};

/// Extents `first` up to but not including `last`.
struct ExtentRange {
  std::size_t first = 0;
  std::size_t last = 0;
};

/// `nbytes` rounded up to kIoAlignment: what an extent takes on disk, and its buffer in memory.
[[nodiscard]] std::size_t padded_bytes(std::size_t nbytes) noexcept;

/// The extents in visit order. Not thread-safe while it grows.
class ExtentTable {
 public:
  /// Adds one behind all others; its index.
  std::size_t add(std::string label, std::size_t nbytes);
  /// Adds `nbytes` as several extents of `piece_nbytes` (a positive multiple of kIoAlignment) and a rest, all with the
  /// same label: for state that is larger than a staging buffer. 0 bytes are one empty extent.
  ExtentRange add_in_pieces(const std::string& label, std::size_t nbytes, std::size_t piece_nbytes);

  [[nodiscard]] std::size_t size() const noexcept { return extents_.size(); }
  [[nodiscard]] const Extent& at(std::size_t index) const { return extents_.at(index); }
  /// The file that holds them all.
  [[nodiscard]] std::size_t file_bytes() const noexcept { return file_bytes_; }
  /// The largest buffer that any of them needs.
  [[nodiscard]] std::size_t max_padded_bytes() const noexcept { return max_padded_bytes_; }

 private:
  std::vector<Extent> extents_;
  std::size_t file_bytes_ = 0;
  std::size_t max_padded_bytes_ = 0;
};

}  // namespace pannier
