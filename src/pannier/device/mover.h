// Carries bytes between host and device in one direction. The copy engine is a queue, and whatever the user's code
// reads from the device waits behind all that is queued there; so a thread of ours feeds it, piece by piece, and never
// has more than a few pieces in flight. Transfers are done in the order in which they were pushed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
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
  [[nodiscard]] Device& device() const noexcept { return device_; }
  /// Finishes what was pushed and ends the thread. Later pushes throw.
  void close() noexcept;

 private:
  struct Job {
    std::vector<CopyRun> runs;
    std::vector<EventPtr> after;
    TransferPtr after_transfer;
    TransferPtr transfer;
    TraceLabel label;
  };
  struct InFlight {
    EventPtr event;
    TransferPtr transfer;  ///< Done with this piece; null for pieces before its last.
  };
  void work();
  void issue(const Job& job);
  void issue_piece(const CopyRun& piece, const TransferPtr& last_of);
  void retire_oldest();

  Device& device_;
  Queue queue_;
  MoverOptions options_;
  RandomDelay delay_;               ///< Of the thread alone.
  std::deque<InFlight> in_flight_;  ///< Of the thread alone.
  std::mutex jobs_mutex_;           ///< Guards jobs_ and closing_.
  std::condition_variable jobs_changed_;
  std::deque<Job> jobs_;
  bool closing_ = false;
  std::exception_ptr error_;  ///< The first; everything pushed after it fails with it. Guarded by jobs_mutex_.
  std::thread thread_;
};

}  // namespace pannier
