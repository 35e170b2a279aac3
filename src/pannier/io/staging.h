// The bounded memory between disk and update: a fixed number of equal buffers, taken and given back. It is all the host
// memory that state on disk costs, whatever the size of the model.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/base/parallel.h"
#include "pannier/io/fork_safe_condition.h"
#include "pannier/mem/host_slab.h"

namespace pannier {

class StagingPool;

/// Options of StagingPool; the first two are the configuration's keys of the same names.
struct StagingOptions {
  std::size_t buffer_count = 5;                      ///< At least 1.
  std::size_t buffer_size = std::size_t{100} << 20;  ///< Bytes of each, rounded up to kIoAlignment; at least 1.
  std::string owner = "nvme staging";                ///< For the account of host memory, and errors.
  NumaPolicy numa_policy = NumaPolicy::kFirstTouch;  ///< Where the pages come from.
  int numa_node = -1;                                ///< For NumaPolicy::kNode only.
  /// Throws ConfigError when a field makes no sense.
  void validate() const;
};

/// One buffer on loan; goes back to its pool when destroyed. Move-only. One thread at a time.
class StagingBuffer {
 public:
  StagingBuffer() noexcept = default;
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  ~StagingBuffer() { give_back(); }

  /// Gives it back now; no transfer may use it any more.
  void give_back() noexcept;
  /// Aligned to kIoAlignment; empty when the object holds no buffer.
  [[nodiscard]] std::span<std::byte> data() const noexcept { return data_; }
  [[nodiscard]] bool is_held() const noexcept { return pool_ != nullptr; }

 private:
  friend class StagingPool;
  StagingBuffer(StagingPool& pool, std::span<std::byte> data) noexcept : pool_(&pool), data_(data) {}

  StagingPool* pool_ = nullptr;  ///< Null when empty.
  std::span<std::byte> data_;
};

/// Owns the buffers. Thread-safe. Must outlive them.
class StagingPool {
 public:
  /// Maps and zero-fills all buffers at once. Throws OutOfMemoryError naming the owner when host memory does not
  /// suffice; ConfigError for options that make no sense.
  StagingPool(HostMemory& memory, const StagingOptions& options, const ParallelFor& parallel_for = serial_for);
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;
  ~StagingPool() = default;

  /// Waits for a free buffer. Throws InternalError once the pool is closed.
  [[nodiscard]] StagingBuffer acquire();
  /// A buffer if one is free now and the pool is open.
  [[nodiscard]] std::optional<StagingBuffer> try_acquire();
  /// Wakes whoever waits, with an error: for an orderly end.
  void close() noexcept;

  [[nodiscard]] std::size_t buffer_nbytes() const noexcept { return buffer_nbytes_; }
  [[nodiscard]] std::size_t buffer_count() const noexcept { return buffer_count_; }
  [[nodiscard]] std::size_t num_free() const;
  /// The most buffers that were on loan at one time.
  [[nodiscard]] std::size_t peak_in_use() const;
  /// What the pool takes of host memory.
  [[nodiscard]] std::size_t mapped_bytes() const noexcept { return slab_.mapped_bytes(); }
  /// All of its memory, in spans under 1 GiB: IoEngineOptions::buffers. No buffer of 512 MiB or less is cut.
  [[nodiscard]] std::vector<std::span<std::byte>> regions();

 private:
  friend class StagingBuffer;
  void take_back(std::span<std::byte> data) noexcept;
  StagingBuffer take_locked();

  std::size_t buffer_nbytes_;
  std::size_t buffer_count_;
  HostSlab slab_;
  mutable std::mutex free_mutex_;  ///< Guards everything below.
  ForkSafeCondition free_changed_;
  std::vector<std::byte*> free_;
  std::size_t peak_in_use_ = 0;
  bool is_closed_ = false;
};

}  // namespace pannier
