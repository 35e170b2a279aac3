#include "pannier/io/extent_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/disk_file.h"

namespace pannier {

std::size_t padded_bytes(std::size_t nbytes) noexcept {
  return (nbytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
}

std::size_t ExtentTable::add(std::string label, std::size_t nbytes) {
  extents_.push_back({std::move(label), file_bytes_, nbytes});
  const std::size_t padded = padded_bytes(nbytes);
  file_bytes_ += padded;
  max_padded_bytes_ = std::max(max_padded_bytes_, padded);
  return extents_.size() - 1;
}

ExtentRange ExtentTable::add_in_pieces(const std::string& label, std::size_t nbytes, std::size_t piece_nbytes) {
  PANNIER_CHECK(piece_nbytes > 0 && piece_nbytes % kIoAlignment == 0,
                fmt::format("pieces of {} bytes are no positive multiple of {}", piece_nbytes, kIoAlignment));
  ExtentRange range{extents_.size(), extents_.size()};
  std::size_t at = 0;
  do {
    const std::size_t piece = std::min(piece_nbytes, nbytes - at);
    range.last = add(label, piece) + 1;
    at += piece;
  } while (at < nbytes);
  return range;
}

}  // namespace pannier
