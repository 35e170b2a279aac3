// The thread that updates host-resident buckets while the model's next forward runs. The engine's thread prepares each
// bucket's update down to raw addresses (gradients have arrived, the state is lent) and hands all of them over in the
// order in which they will be needed; this thread runs the kernels and sends each new parameter on its way up.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "pannier/base/random_delay.h"
#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/kernels/update.h"
#include "pannier/optim/update_path.h"

namespace pannier {

/// How many elements were updated in which time, and what the way down carried beside it.
struct HostUpdateTime {
  std::int64_t numel = 0;
  double seconds = 0.0;
  MoverWork down{};
};

/// What `mover` carried since it had carried `before`.
[[nodiscard]] inline MoverWork work_since(const MoverWork& before, const Mover& mover) {
  const MoverWork now = mover.work_done();
  return {now.nbytes - before.nbytes, now.busy_s - before.busy_s};
}

/// How to run them.
struct HostUpdaterOptions {
  kernels::Algorithm algorithm = kernels::Algorithm::kAdamW;
  kernels::StateFormat format = kernels::StateFormat::kFp32;
  std::uint64_t delay_seed = 0;  ///< Not 0: sleeps a random while before each bucket, to shake races out.
  int most_threads = 0;          ///< 0: all of torch's.
  const Mover* down = nullptr;   ///< Watched while updates run; null: none is.
};

/// Runs updates on a thread of its own, on torch's parallel_for. Its calls come from one thread. The first error is
/// kept: it drops what is left to do, and every later call but close() rethrows it. An IoError, of a disk that lends a
/// chunk, is told once instead, to who waits for what is not updated; who waits again has it tried again.
class HostUpdater {
 public:
  /// What it refers to must outlive it.
  HostUpdater(Mover& up, int num_buckets, const HostUpdaterOptions& options);
  ~HostUpdater();
  HostUpdater(const HostUpdater&) = delete;
  HostUpdater& operator=(const HostUpdater&) = delete;

  /// Begins these updates, in this order, with one gradient factor. Nothing may be under way. Parameters set out after
  /// `after`, until which the device may still read the old ones.
  void start(std::vector<BucketUpdate> updates, float grad_factor, EventPtr after);
  /// The host waits until a bucket's parameter is on its way; the event then marks its arrival.
  [[nodiscard]] EventPtr wait_issued(int bucket);
  /// What was updated since the last call, and how fast.
  [[nodiscard]] HostUpdateTime take_time();
  /// Finishes what was begun and ends the thread. Later calls of start() throw.
  void close() noexcept;

 private:
  void work();
  void run(BucketUpdate& update);

  Mover& up_;
  HostUpdaterOptions options_;
  CpuCompute compute_;
  RandomDelay delay_;                ///< Of the thread alone.
  std::mutex updates_mutex_;         ///< Guards everything below but the thread.
  std::condition_variable changed_;  ///< There is more to do, or a bucket was sent.
  std::deque<BucketUpdate> updates_;
  float grad_factor_ = 1.0F;
  EventPtr after_;
  std::vector<TransferPtr> sent_;  ///< By bucket; null while its update is not done.
  HostUpdateTime time_;
  std::exception_ptr error_;
  bool is_paused_ = false;  ///< An IoError stopped the updates.
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace pannier
