// What happens when in a step, so that a person sees what overlaps: spans of work on the host's threads and in the
// device's queues. Where a profiler listens, the host's spans are ranges of its too (NVTX). Outside of the one step
// that is traced, a span costs a read of a flag.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pannier {

class Device;
class Event;
enum class Queue : std::uint8_t;

/// Where a span is drawn: the thread that calls the engine, updates in host memory, and the device's three queues.
enum class TraceRow : std::uint8_t { kCaller, kHostUpdates, kCompute, kUp, kDown };
inline constexpr std::size_t kNumTraceRows = 5;

/// "caller", "host updates", "device compute", "to the device", "to the host".
[[nodiscard]] const char* to_string(TraceRow row) noexcept;

/// What a span is about.
struct TraceLabel {
  const char* what = "";   ///< A string that lives for ever: "states", "update".
  int index = -1;          ///< Of the bucket or unit; -1: none.
  std::size_t nbytes = 0;  ///< That were moved; 0: not a transfer.
};

/// One span of a traced step.
struct TraceSpan {
  TraceRow row = TraceRow::kCaller;
  TraceLabel label;
  double begin_s = 0;  ///< Since start(); of a queue: when the device came there.
  double end_s = 0;
};

/// Collects spans between start() and take(). Scopes may begin and end on any thread; start() and take() are one
/// thread's.
class StepTrace {
 public:
  /// A span that lasts until the scope ends, or is destroyed. Movable.
  class Scope {
   public:
    Scope() = default;
    Scope(Scope&& other) noexcept { *this = std::move(other); }
    Scope& operator=(Scope&& other) noexcept;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { end(); }
    void end() noexcept;

   private:
    friend class StepTrace;
    StepTrace* trace_ = nullptr;
    std::size_t window_ = 0;  ///< The traced step in which it began; 0: none.
    TraceRow row_ = TraceRow::kCaller;
    TraceLabel label_;
    std::chrono::steady_clock::time_point begin_;
    std::shared_ptr<const Event> begin_event_;  ///< Null: work of the host.
    std::uint64_t range_ = 0;                   ///< The profiler's; 0: none.
  };

  /// Times of queues are the device's.
  explicit StepTrace(Device& device) : device_(device) {}

  [[nodiscard]] bool is_on() const noexcept { return window_.load(std::memory_order_relaxed) != 0; }
  /// Keeps what begins from now on. The host waits for the device once, to set the clocks.
  void start();
  /// Ends it, waits for the device's part, and returns what ended meanwhile, in order of beginning: of the host also
  /// what had begun before, from start() on.
  [[nodiscard]] std::vector<TraceSpan> take();

  /// Work of the calling thread.
  [[nodiscard]] Scope host(TraceRow row, const TraceLabel& label);
  /// What the calling thread puts into a queue.
  [[nodiscard]] Scope queued(Queue queue, const TraceLabel& label);

 private:
  struct QueueSpan {
    TraceRow row;
    TraceLabel label;
    std::shared_ptr<const Event> begin;
    std::shared_ptr<const Event> end;
  };
  void keep(Scope& scope);

  Device& device_;
  std::atomic<std::size_t> window_{0};  ///< Counts traced steps; 0 while none is.
  std::size_t num_windows_ = 0;
  std::chrono::steady_clock::time_point began_;
  std::shared_ptr<const Event> began_event_;
  std::mutex spans_mutex_;  ///< Guards the two lists.
  std::vector<TraceSpan> host_spans_;
  std::vector<QueueSpan> queue_spans_;
};

}  // namespace pannier
