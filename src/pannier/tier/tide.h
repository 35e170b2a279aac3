// Lends host-resident optimizer state to the device. Like a tide, states come up into the room that activations leave
// during backward, are updated there, and go down again during the next forward. A bucket's buffer stays on the device
// as long as nobody needs its room, and is then used again without a transfer.
//
// Who decides when there is room is optim/tide_pilot; here is only what one bucket can do, in any order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "pannier/device/mover.h"
#include "pannier/tier/parameter_shards.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// What a tide works with. Everything must outlive it.
struct TideParts {
  Device& device;
  HostStateStore& host;
  Mover& up;
  Mover& down;
  StateShape shape;
  std::vector<std::int64_t> bucket_numels;
  std::function<at::Tensor(int)> param_bucket;  ///< The bucket's flat parameter on the device.
  /// What keeps a bucket's parameters in host memory, and they then travel with the states; empty, or null for a
  /// bucket: they are on the device.
  std::function<ParameterShards*(int)> at_rest{};
};

/// A store whose leases are on the device. One thread at a time, but for give_back(); only it allocates and frees
/// device memory.
class Tide final : public StateStore {
 public:
  explicit Tide(TideParts parts);
  ~Tide() override;

  [[nodiscard]] Home home() const noexcept override { return Home::kHost; }

  /// Called before a lease of a bucket that is not on the device: makes room for it.
  void before_lease(std::function<void(int)> make_room) { make_room_ = std::move(make_room); }
  /// Whether the bucket's way up has been issued: the host need not wait for it, only the device.
  [[nodiscard]] bool is_ready(int bucket) const override;
  /// Starts a bucket's way up, where it is not on the device yet. Throws torch's out-of-memory error.
  void raise(int bucket);
  /// Whether the bucket has a buffer on the device, on its way up or down or at rest there.
  [[nodiscard]] bool is_up(int bucket) const;
  /// Bytes of device memory that a bucket takes.
  [[nodiscard]] std::size_t nbytes(int bucket) const;
  /// Bytes of device memory taken now.
  [[nodiscard]] std::size_t live_nbytes() const noexcept;
  /// Frees buffers until at most `nbytes` are taken: first those that hold nothing new, waiting for others to come
  /// down where `wait`. Those raised for the next update are kept unless `also_raised`.
  void shrink_to(std::size_t nbytes, bool wait, bool also_raised);
  /// The device is short of memory: frees all that no lease holds, waiting for copies. May be called from within
  /// another call's allocation; does nothing while another thread is in a call. Says whether it freed anything.
  bool give_back();
  /// Makes the bucket's state on the host the only one: waits for it to come down, or drops what was only read.
  void recall(int bucket);
  /// Waits until every change is down on the host. Buffers stay.
  void settle();

 protected:
  [[nodiscard]] StateView acquire(ChunkId chunk, Access access) override;
  void release(ChunkId chunk, Access access, TransferPtr reader) noexcept override;

 private:
  struct Slot {
    at::Tensor buffer;
    TransferPtr up;       ///< The last way up.
    TransferPtr down;     ///< The last way down.
    bool raised = false;  ///< Meant for the next update.
    bool leased = false;
  };
  void free(Slot& slot, int bucket);
  void require_whole() const;
  [[nodiscard]] HostBucketLayout layout(int bucket) const;
  [[nodiscard]] ParameterShards* at_rest(int bucket) const { return parts_.at_rest ? parts_.at_rest(bucket) : nullptr; }
  [[nodiscard]] std::size_t state_nbytes(int bucket) const { return layout(bucket).offsets[3]; }
  [[nodiscard]] std::size_t param_nbytes(int bucket) const;
  [[nodiscard]] void* param_in(const at::Tensor& buffer, int bucket) const;

  TideParts parts_;
  mutable std::recursive_mutex mutex_;  ///< Guards everything below against give_back().
  std::vector<Slot> slots_;
  std::vector<int> sent_down_;  ///< Buckets in the order of their last release; may hold some that are gone.
  std::size_t live_nbytes_ = 0;
  std::function<void(int)> make_room_;
  std::exception_ptr broken_;  ///< An error on the way down, which the next call rethrows.
};

}  // namespace pannier
