#include "pannier/io/staging.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/disk_file.h"

namespace pannier {
namespace {

constexpr std::size_t kMaxRegionBytes = std::size_t{512} << 20;

const StagingOptions& validated(const StagingOptions& options) {
  options.validate();
  return options;
}

std::size_t aligned(std::size_t nbytes) { return (nbytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment; }

}  // namespace

void StagingOptions::validate() const {
  if (buffer_count == 0) {
    throw ConfigError("buffer_count must be at least 1");
  }
  if (buffer_size == 0 || buffer_size > std::numeric_limits<std::size_t>::max() / 4 / buffer_count) {
    throw ConfigError(
        fmt::format("buffer_size {} with buffer_count {} is no size of memory", buffer_size, buffer_count));
  }
}

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), data_(std::exchange(other.data_, {})) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this != &other) {
    give_back();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = std::exchange(other.data_, {});
  }
  return *this;
}

void StagingBuffer::give_back() noexcept {
  if (pool_ != nullptr) {
    std::exchange(pool_, nullptr)->take_back(std::exchange(data_, {}));
  }
}

StagingPool::StagingPool(HostMemory& memory, const StagingOptions& options, const ParallelFor& parallel_for)
    : buffer_nbytes_(aligned(validated(options).buffer_size)),
      buffer_count_(options.buffer_count),
      slab_(memory, buffer_nbytes_ * buffer_count_,
            {.owner = options.owner, .numa_policy = options.numa_policy, .numa_node = options.numa_node},
            parallel_for) {
  free_.reserve(buffer_count_);
  for (std::size_t i = buffer_count_; i > 0; --i) {
    free_.push_back(slab_.data().data() + (i - 1) * buffer_nbytes_);
  }
}

StagingBuffer StagingPool::take_locked() {
  auto* const data = free_.back();
  free_.pop_back();
  peak_in_use_ = std::max(peak_in_use_, buffer_count_ - free_.size());
  return {*this, std::span(data, buffer_nbytes_)};
}

StagingBuffer StagingPool::acquire() {
  std::unique_lock lock(free_mutex_);
  free_changed_->wait(lock, [this] { return is_closed_ || !free_.empty(); });
  PANNIER_CHECK(!is_closed_, "a staging buffer was asked for after the pool was closed");
  return take_locked();
}

std::optional<StagingBuffer> StagingPool::try_acquire() {
  const std::lock_guard lock(free_mutex_);
  if (is_closed_ || free_.empty()) {
    return std::nullopt;
  }
  return take_locked();
}

void StagingPool::take_back(std::span<std::byte> data) noexcept {
  {
    const std::lock_guard lock(free_mutex_);
    free_.push_back(data.data());  // Within what was reserved.
  }
  free_changed_->notify_one();
}

void StagingPool::close() noexcept {
  {
    const std::lock_guard lock(free_mutex_);
    is_closed_ = true;
  }
  free_changed_->notify_all();
}

std::size_t StagingPool::num_free() const {
  const std::lock_guard lock(free_mutex_);
  return free_.size();
}

std::size_t StagingPool::peak_in_use() const {
  const std::lock_guard lock(free_mutex_);
  return peak_in_use_;
}

std::vector<std::span<std::byte>> StagingPool::regions() {
  // Whole buffers together where they fit, so that no piece of a buffer crosses from one region to the next.
  const std::size_t step =
      buffer_nbytes_ > kMaxRegionBytes ? kMaxRegionBytes : kMaxRegionBytes / buffer_nbytes_ * buffer_nbytes_;
  std::vector<std::span<std::byte>> regions;
  const auto all = slab_.data();
  for (std::size_t at = 0; at < all.size(); at += step) {
    regions.push_back(all.subspan(at, std::min(step, all.size() - at)));
  }
  return regions;
}

}  // namespace pannier
