// Watches over a group beside its collectives. Collectives of the library below hang or end the process when a rank is
// missing, and their errors name addresses; the monitor names ranks. It is one thread that only polls the store:
//  1. It publishes where this rank is: a heartbeat and the last operation it has begun.
//  2. It looks for a failure that another rank has published, and marks the group dead with that message.
//  3. It watches the heartbeat of the next rank that is still there; so each rank is watched, at a cost that does not
//     grow with their number. Where that rank runs another operation under the same number, that is a failure too.
//  4. When a waiter is over its deadline, or has lost a connection, it reads where all ranks are, composes the message
//     and publishes it. The first failure to be published is everyone's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "pannier/comm/group_state.h"
#include "pannier/comm/key_value_store.h"
#include "pannier/comm/label.h"

namespace pannier {

struct MonitorOptions {
  std::chrono::milliseconds poll_interval{250};
  std::chrono::milliseconds heartbeat_timeout{10'000};  ///< A rank without heartbeat for this long is dead.
};

/// What the thread and the monitor share. Everything that changes is guarded by the group state's lock.
struct MonitorShared;

/// Runs the thread. Thread-safe. The destructor tells the thread to end and does not wait for it, so that it may run
/// anywhere, with the interpreter's lock held too.
class Monitor {
 public:
  Monitor(std::unique_ptr<KeyValueStore> store, std::shared_ptr<GroupState> state, int rank, int world_size,
          MonitorOptions options);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Lets the monitor's thread call this too, at each poll; it must not throw.
  void also_poll(std::function<void()> poll);

  /// Notes that this rank has begun operation number `sequence`, which follows the one noted before.
  void reached(std::uint32_t sequence, const Label& label);

  /// Ask for the group to be marked dead; these return at once.
  void report_failure(const std::string& message);
  void report_lost(int other_rank, const std::string& operation, const std::string& why);
  void report_overdue(std::uint32_t sequence, const Label& label, double seconds);
  /// A message that names its ranks already.
  void report_mismatch(const std::string& message);
  /// Waits for what was reported to have its effect on this rank, and for the others to be able to see it. Should the
  /// store itself hang, the group is marked dead with `otherwise`.
  void wait_until_failed(const std::string& otherwise);

  /// Says to the others that this rank has left, and waits (for some seconds at most) for the thread's end.
  void close();

 private:
  std::shared_ptr<MonitorShared> shared_;  ///< Shared with the thread, which may be stuck in the store and outlive us.
};

}  // namespace pannier
