#include "pannier/ckpt/packed_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/sealed_folder.h"
#include "pannier/io/disk_file.h"

namespace pannier::ckpt {

PackedFile::PackedFile(FileMover& mover, OwnedFd fd, std::string path, std::uint64_t nbytes)
    : mover_(mover), file_{std::move(fd), std::move(path)}, nbytes_(nbytes) {
  set_space_aside(file_, nbytes_);
  prefer_direct(file_.fd.get());
}

PackedFile::~PackedFile() {
  for (const auto& transfer : under_way_) {
    transfer->wait_ended();
  }
}

void PackedFile::take_results(bool wait) {
  while (!under_way_.empty() && (wait || under_way_.front()->is_done())) {
    const IoTransferPtr transfer = std::move(under_way_.front());
    under_way_.pop_front();
    transfer->wait_done();
  }
}

void PackedFile::send(std::size_t nbytes) {
  take_results(/*wait=*/false);
  under_way_.push_back(mover_.write(file_, sent_, std::move(buffer_), nbytes));
  sent_ += nbytes;
  filled_ = 0;
}

void PackedFile::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (!buffer_.is_held()) {
      buffer_ = mover_.acquire();
    }
    const auto room = buffer_.data().subspan(filled_);
    const std::size_t part = std::min(room.size(), bytes.size());
    std::memcpy(room.data(), bytes.data(), part);
    bytes = bytes.subspan(part);
    filled_ += part;
    if (filled_ == buffer_.data().size()) {
      send(filled_);
    }
  }
}

void PackedFile::finish() {
  PANNIER_CHECK(sent_ + filled_ == nbytes_,
                fmt::format("'{}': {} bytes were written, {} were expected", file_.path, sent_ + filled_, nbytes_));
  if (filled_ > 0) {
    const std::size_t padded = (filled_ + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
    std::memset(buffer_.data().data() + filled_, 0, padded - filled_);
    send(padded);
  }
  take_results(/*wait=*/true);
  if (::ftruncate(file_.fd.get(), static_cast<off_t>(nbytes_)) != 0) {
    throw IoError(fmt::format("cut '{}' to {} bytes", file_.path, nbytes_), errno);
  }
  sync_to_disk(file_.fd.get(), file_.path);
}

}  // namespace pannier::ckpt
