// The account of a device's memory: how much each owner holds, the peaks, and the course of it over time. Whoever sees
// allocations come and go (a meter in front of torch's CPU allocator, or a listener at its CUDA allocator) keeps one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pannier {

/// For whom device memory was allocated. Everything that Pannier does not allocate itself is kActivations;
/// kStreamedStates are optimizer states that rest on the host and are on the device for a while.
enum class Owner : std::uint8_t { kParameters, kGradients, kOptimizerStates, kActivations, kStreamedStates };
inline constexpr std::size_t kNumOwners = 5;
using BytesByOwner = std::array<std::size_t, kNumOwners>;

/// "parameters", "gradients", "optimizer states", "activations", "streamed states".
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

/// Counts bytes by owner. Thread-safe.
class MemoryLedger {
 public:
  /// `device` is how messages call it: "CPU".
  explicit MemoryLedger(std::string device) : device_(std::move(device)) {}

  /// Throws torch's out-of-memory error, and counts nothing, where the total would pass the cap.
  void add(Owner owner, std::size_t nbytes);
  void remove(Owner owner, std::size_t nbytes) noexcept;
  /// Counts for another owner what was counted for one.
  void move(Owner from, Owner to, std::size_t nbytes) noexcept;

  /// Refuses additions that would take the total above `nbytes`. Of several caps the least counts. Throws ConfigError
  /// if more is in use already.
  void add_cap(std::size_t nbytes);
  /// Lifts a cap that add_cap set.
  void remove_cap(std::size_t nbytes) noexcept;
  [[nodiscard]] DeviceMemory memory() const;
  /// Starts a new peak at what is in use now.
  void reset_peak();
  /// The most that was in use since the last call by all but kStreamedStates; a count of its own beside reset_peak().
  [[nodiscard]] std::size_t take_peak();

  /// Starts recording; a sample is kept whenever `resolution_bytes` have come, gone or changed owner.
  void start_timeline(std::size_t resolution_bytes);
  /// Ends recording and returns the samples in order of time.
  [[nodiscard]] std::vector<MemorySample> take_timeline();

 private:
  void rise(std::size_t index, std::size_t nbytes) noexcept;
  [[nodiscard]] std::size_t without_streamed() const noexcept;
  void sample() noexcept;

  std::string device_;
  mutable std::mutex counts_mutex_;  ///< Guards everything below.
  DeviceMemory memory_;
  std::size_t recent_peak_ = 0;  ///< Since take_peak().
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

/// The owner that the calling thread's allocations count for.
[[nodiscard]] Owner current_owner() noexcept;

}  // namespace pannier
