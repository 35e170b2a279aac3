#include "pannier/io/extent_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "pannier/io/checksum.h"

namespace pannier {
namespace {

const char* name_of(ExtentState state) {
  constexpr std::array kNames = {"empty", "clean", "being read", "being written", "dirty (its write failed)"};
  return kNames.at(static_cast<std::size_t>(state));
}

// The text of the error less the kernel's reason at its end, which an error made of it adds again.
std::string without_reason(const IoError& error) {
  std::string text = error.what();
  const std::string reason = IoError("", error.error_number()).what();
  return text.ends_with(reason) ? text.substr(0, text.size() - reason.size()) : text;
}

}  // namespace

ChecksumError::ChecksumError(const std::string& what_failed, std::size_t extent)
    : IoError(what_failed, EIO), extent_(extent) {}

void ExtentTransfer::wait_done() {
  try {
    transfer_->wait_done();
  } catch (const IoError& error) {
    throw IoError(fmt::format("{}: {}", what_, without_reason(error)), error.error_number());
  }
  if (to_verify_.data() != nullptr) {
    const auto bytes = std::exchange(to_verify_, {});
    if (const auto actual = checksum(bytes); actual != expected_) {
      throw ChecksumError(
          fmt::format("{}: wrong checksum, {:016x} where {:016x} was written", what_, actual, expected_), index_);
    }
  }
}

ExtentFile::ExtentFile(ExtentTable table, IoEngine& engine)
    : table_(std::move(table)), engine_(engine), process_(::getpid()), status_(table_.size()) {
  PANNIER_CHECK(table_.file_bytes() <= engine.file().nbytes(),
                fmt::format("extents of {} bytes in a file of {}", table_.file_bytes(), engine.file().nbytes()));
}

ExtentFile::~ExtentFile() {
  if (process_ == ::getpid()) {
    wait_ended();
  }
}

std::string ExtentFile::describe(std::size_t index) const {
  const Extent& extent = table_.at(index);
  return fmt::format("extent {} ('{}', {} bytes at offset {})", index, extent.label, extent.nbytes, extent.offset);
}

void ExtentFile::check_buffer(std::size_t index, std::span<const std::byte> buffer) const {
  PANNIER_CHECK(buffer.size() >= padded_bytes(table_.at(index).nbytes),
                fmt::format("a buffer of {} bytes is too small for {}", buffer.size(), describe(index)));
}

ExtentTransfer ExtentFile::read(std::size_t index, std::span<std::byte> buffer, Verify verify) {
  check_buffer(index, buffer);
  const Extent& extent = table_.at(index);
  ExtentTransfer handle;
  handle.index_ = index;
  handle.what_ = "read of " + describe(index);
  {
    const std::lock_guard lock(status_mutex_);
    Status& status = status_[index];
    PANNIER_CHECK(status.state == ExtentState::kClean || status.state == ExtentState::kReading,
                  fmt::format("{} was to be read while it is {}", describe(index), name_of(status.state)));
    status.state = ExtentState::kReading;
    ++status.readers;
    ++under_way_;
    handle.expected_ = status.checksum;
  }
  if (verify == Verify::kOnWait && extent.nbytes > 0) {
    handle.to_verify_ = buffer.first(extent.nbytes);
  }
  try {
    handle.transfer_ = engine_.read(extent.offset, buffer.first(padded_bytes(extent.nbytes)),
                                    [this, index](bool) { end_read(index); });
  } catch (...) {
    end_read(index);
    throw;
  }
  return handle;
}

ExtentTransfer ExtentFile::write(std::size_t index, std::span<std::byte> buffer,
                                 std::optional<std::uint64_t> checksum) {
  check_buffer(index, buffer);
  const Extent& extent = table_.at(index);
  const auto padded = buffer.first(padded_bytes(extent.nbytes));
  ExtentTransfer handle;
  handle.index_ = index;
  handle.what_ = "write of " + describe(index);
  ExtentState before = ExtentState::kEmpty;
  {
    const std::lock_guard lock(status_mutex_);
    Status& status = status_[index];
    PANNIER_CHECK(status.state != ExtentState::kReading && status.state != ExtentState::kWriting,
                  fmt::format("{} was to be written while it is {}", describe(index), name_of(status.state)));
    before = std::exchange(status.state, ExtentState::kWriting);
    ++under_way_;
  }
  if (padded.size() > extent.nbytes) {
    std::memset(padded.data() + extent.nbytes, 0, padded.size() - extent.nbytes);
  }
  const std::uint64_t sum = checksum ? *checksum : pannier::checksum(buffer.first(extent.nbytes));
  try {
    handle.transfer_ =
        engine_.write(extent.offset, padded, [this, index, sum](bool succeeded) { end_write(index, sum, succeeded); });
  } catch (...) {
    const std::lock_guard lock(status_mutex_);
    status_[index].state = before;  // Nothing went to the disk.
    --under_way_;
    under_way_changed_->notify_all();
    throw;
  }
  return handle;
}

void ExtentFile::end_read(std::size_t index) noexcept {
  const std::lock_guard lock(status_mutex_);
  Status& status = status_[index];
  if (--status.readers == 0) {
    status.state = ExtentState::kClean;
  }
  --under_way_;
  under_way_changed_->notify_all();
}

void ExtentFile::end_write(std::size_t index, std::uint64_t checksum, bool succeeded) noexcept {
  const std::lock_guard lock(status_mutex_);
  Status& status = status_[index];
  status.state = succeeded ? ExtentState::kClean : ExtentState::kDirty;
  if (succeeded) {
    status.checksum = checksum;
    ++status.num_writes;
  }
  --under_way_;
  under_way_changed_->notify_all();
}

void ExtentFile::verify(std::size_t index, std::uint64_t actual) const {
  std::uint64_t expected = 0;
  {
    const std::lock_guard lock(status_mutex_);
    expected = status_.at(index).checksum;
  }
  if (actual != expected) {
    throw ChecksumError(
        fmt::format("read of {}: wrong checksum, {:016x} where {:016x} was written", describe(index), actual, expected),
        index);
  }
}

void ExtentFile::wait_ended() noexcept {
  std::unique_lock lock(status_mutex_);
  under_way_changed_->wait(lock, [this] { return under_way_ == 0; });
}

ExtentState ExtentFile::state(std::size_t index) const {
  const std::lock_guard lock(status_mutex_);
  return status_.at(index).state;
}

std::uint64_t ExtentFile::num_writes(std::size_t index) const {
  const std::lock_guard lock(status_mutex_);
  return status_.at(index).num_writes;
}

}  // namespace pannier
