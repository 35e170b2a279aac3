// The meter that makes a machine without a GPU behave like one with a known, finite device memory: torch's CPU
// allocations go through it and count as device memory, by owner, with an optional cap. Host slabs are mapped, not
// allocated by torch, so they do not count.
//
// Not seen, because it never passes torch's allocator: numpy arrays, torch.load(mmap=True), shared memory, and whatever
// was allocated before the meter was installed.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pannier {

/// For whom device memory was allocated. Everything that Pannier does not allocate itself is kActivations.
enum class Owner : std::uint8_t { kParameters, kGradients, kOptimizerStates, kActivations };
inline constexpr std::size_t kNumOwners = 4;
using BytesByOwner = std::array<std::size_t, kNumOwners>;

/// "parameters", "gradients", "optimizer states", "activations".
[[nodiscard]] const char* to_string(Owner owner) noexcept;

/// Device memory in bytes, as requested from the allocator.
struct DeviceMemory {
  std::size_t current = 0;
  std::size_t peak = 0;  ///< Since the last reset.
  std::size_t cap = 0;   ///< 0: none.
  BytesByOwner current_by_owner{};
  BytesByOwner peak_by_owner{};  ///< Each owner's own peak; they need not coincide.
};

/// One moment of a run.
struct MemorySample {
  double seconds = 0;  ///< Since the timeline was started.
  BytesByOwner by_owner{};
};

/// Counts what torch's CPU allocator serves. Thread-safe. There is one, because there is one CPU allocator.
class MemoryMeter final : public c10::Allocator {
 public:
  /// Puts the meter in front of torch's CPU allocator, once; later calls return the same meter, which lives for ever.
  static MemoryMeter& install();

  c10::DataPtr allocate(std::size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &MemoryMeter::free_block; }
  void copy_data(void* dest, const void* src, std::size_t count) const override;

  /// Whether a storage's memory was served, and so counted, by this meter.
  [[nodiscard]] bool counts(const c10::DataPtr& data) const noexcept {
    return data.get_deleter() == &MemoryMeter::free_block;
  }

  /// Counts memory that was served for one owner for another from now on. Memory that is not ours is left alone.
  void reassign(const c10::DataPtr& data, Owner owner) noexcept;

  /// Refuses allocations that would take the total above `nbytes` with torch's out-of-memory error. Of several caps the
  /// least counts. Throws ConfigError if more is in use already.
  void add_cap(std::size_t nbytes);
  /// Lifts a cap that add_cap set.
  void remove_cap(std::size_t nbytes) noexcept;
  [[nodiscard]] DeviceMemory memory() const;
  /// Starts a new peak at what is in use now.
  void reset_peak();

  /// Starts recording; a sample is kept whenever `resolution_bytes` have come, gone or changed owner.
  void start_timeline(std::size_t resolution_bytes);
  /// Ends recording and returns the samples in order of time.
  [[nodiscard]] std::vector<MemorySample> take_timeline();

 private:
  struct Block;
  explicit MemoryMeter(c10::Allocator& inner) : inner_(inner) {}
  static void free_block(void* data) noexcept;
  void count(Owner owner, std::size_t nbytes);
  void uncount(Owner owner, std::size_t nbytes) noexcept;
  void sample() noexcept;

  c10::Allocator& inner_;
  mutable std::mutex counts_mutex_;  ///< Guards everything below.
  DeviceMemory memory_;
  std::multiset<std::size_t> caps_;
  bool recording_ = false;
  std::size_t resolution_ = 0;
  BytesByOwner last_sampled_{};
  double started_seconds_ = 0;
  std::vector<MemorySample> samples_;
};

/// While it lives, the calling thread's allocations count for `owner`.
class OwnerScope {
 public:
  explicit OwnerScope(Owner owner) noexcept;
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;

 private:
  Owner before_;
};

}  // namespace pannier
