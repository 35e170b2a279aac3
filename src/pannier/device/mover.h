// Carries bytes between host and device in one direction. The copy engine is a queue, and whatever the user's code
// reads from the device waits behind all that is queued there; so a thread of ours feeds it, piece by piece, and never
// has more than a few pieces in flight. Transfers are done in the order in which they were pushed, but for urgent ones:
// those go before all that are not, between two pieces of one under way, as soon as what they wait for is there. Before
// that they would stand at the head of the queue, and all others behind them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pannier/base/random_delay.h"
#include "pannier/device/device.h"

namespace pannier {

/// One run of bytes to copy.
struct CopyRun {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t nbytes = 0;
};

/// One transfer's way: pushed, issued (the device has been told everything), done (the bytes are there). Thread-safe.
class Transfer {
 public:
  /// The host waits until all copies are in the queue; the event then marks their end. Rethrows the mover's error.
  [[nodiscard]] EventPtr wait_issued();
  /// The host waits until the bytes are there. Rethrows the mover's error.
  void wait_done();
  /// The host waits until nothing reads or writes the memory any more, whether the bytes are there or not.
  void wait_ended() noexcept;
  [[nodiscard]] bool is_issued() const;
  [[nodiscard]] bool is_done() const;

 private:
  friend class Mover;
  enum class Stage : std::uint8_t { kPushed, kIssued, kDone };
  void reach(Stage stage, EventPtr event);
  void fail(std::exception_ptr error);
  void wait_for(Stage stage, std::unique_lock<std::mutex>& lock);

  mutable std::mutex stage_mutex_;  ///< Guards everything below.
  std::condition_variable stage_changed_;
  Stage stage_ = Stage::kPushed;
  EventPtr event_;
  std::exception_ptr error_;
};
using TransferPtr = std::shared_ptr<Transfer>;

/// How a mover feeds its queue.
struct MoverOptions {
  std::size_t piece_nbytes = std::size_t{16} << 20;
  std::size_t depth = 2;         ///< Pieces in flight.
  std::uint64_t delay_seed = 0;  ///< Not 0: waits a random while before each piece, to shake races out.
};

/// What a mover has carried, and in how much time something was on its way.
struct MoverWork {
  double nbytes = 0.0;
  double busy_s = 0.0;
};

/// Feeds one queue from a thread of its own, which holds raw addresses only. push() is thread-safe. Ends in close().
class Mover {
 public:
  Mover(Device& device, Queue queue, const MoverOptions& options);
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  /// Copies `runs` after `after` (events of other queues; on the device, the host does not wait) and after the transfer
  /// `after_transfer` has been issued and is done. The memory must stay until the transfer is done. `what` and `index`
  /// name it in a trace.
  TransferPtr push(std::vector<CopyRun> runs, std::vector<EventPtr> after, TransferPtr after_transfer = nullptr,
                   const char* what = "transfer", int index = -1);
  /// The same for what the device's next work needs: ahead of all that push() was given and that is not ready before
  /// it, and not stopped by hold(). `after_transfer` must need nothing that push() was given here.
  TransferPtr push_urgent(std::vector<CopyRun> runs, std::vector<EventPtr> after, TransferPtr after_transfer,
                          const char* what, int index);
  [[nodiscard]] Device& device() const noexcept { return device_; }
  /// Since the start, up to now.
  [[nodiscard]] MoverWork work_done() const;
  /// Issues nothing for a while, or until go_on(), so that what others put into the copy engine's queue gets through:
  /// an engine that always finds a next piece in one queue looks at the others only every few milliseconds.
  void hold(std::chrono::microseconds most);
  void go_on();
  /// Finishes what was pushed and ends the thread. Later pushes throw.
  void close() noexcept;

 private:
  struct Job {
    std::vector<CopyRun> runs;
    std::vector<EventPtr> after;
    TransferPtr after_transfer;
    TransferPtr transfer;
    TraceLabel label;
    bool is_urgent = false;
    std::uint64_t number = 0;  ///< In the order of pushes, in which the device gets to the events too.
    [[nodiscard]] bool is_ready() const;
  };
  struct InFlight {
    EventPtr event;
    TransferPtr transfer;  ///< Done with this piece; null for pieces before its last.
    std::size_t nbytes = 0;
  };
  TransferPtr enqueue(Job job);
  void work();
  [[nodiscard]] bool urgent_is_next() const;
  void issue(const Job& job);
  void issue_urgent();
  void issue_piece(const CopyRun& piece, const TransferPtr& last_of, bool is_urgent);
  void retire_oldest();
  void note_issued();
  void note_retired(std::size_t nbytes);

  Device& device_;
  Queue queue_;
  MoverOptions options_;
  RandomDelay delay_;               ///< Of the thread alone.
  std::deque<InFlight> in_flight_;  ///< Of the thread alone.
  void wait_while_held();

  mutable std::mutex work_mutex_;  ///< Guards the next two.
  MoverWork work_;
  std::optional<std::chrono::steady_clock::time_point> busy_since_;  ///< Something is in flight, not counted before.
  std::chrono::steady_clock::time_point held_until_;                 ///< Guarded by jobs_mutex_.
  std::mutex jobs_mutex_;                                            ///< Guards the jobs and closing_.
  std::condition_variable jobs_changed_;
  std::deque<Job> jobs_;
  std::deque<Job> urgent_jobs_;
  std::uint64_t num_pushed_ = 0;
  bool closing_ = false;
  std::exception_ptr error_;  ///< The first; everything pushed after it fails with it. Guarded by jobs_mutex_.
  std::thread thread_;
};

}  // namespace pannier
