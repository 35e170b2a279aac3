// Where the arithmetic of an update runs and how its result reaches the model: on the device, in the very memory that
// the model reads, or on the host, from where the new parameter travels back. Both run the same arithmetic, so a path
// changes when and where, never what.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/kernels/update.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// A chunk that is lent by whoever runs its update, when he does: a store on a disk can't lend all at once.
struct LentLater {
  StateStore* store = nullptr;
  ChunkId chunk;
  StateShape shape;
  std::vector<std::int64_t> offsets;  ///< Of each task's first element in the chunk.
};

/// The update of a bucket, or of a chunk of it, ready to run: addresses only, so that any thread can.
struct BucketUpdate {
  int bucket = 0;
  std::vector<kernels::UpdateTask> tasks;
  CopyRun parameter;  ///< From where the update writes the parameters to where the model reads them.
  /// Set: tasks have no addresses of states, and `parameter` no source, before place().
  std::optional<LentLater> later;
  bool is_last = true;  ///< Of its bucket.
  /// Gives it the addresses of a chunk that has been lent.
  void place(const StateView& view);
  [[nodiscard]] std::int64_t numel() const;
};

/// One way to update buckets. One thread.
class UpdatePath {
 public:
  UpdatePath() = default;
  virtual ~UpdatePath() = default;
  UpdatePath(const UpdatePath&) = delete;
  UpdatePath& operator=(const UpdatePath&) = delete;

  /// The processor that updates.
  [[nodiscard]] virtual Compute& compute() = 0;
  /// The host's threads that an update may use; 0: it does not run on the host, or on all of torch's.
  [[nodiscard]] virtual int most_threads() const { return 0; }
  /// The way of a chunk's parameters from where the update leaves them to where the model reads them; nothing where
  /// that is the same.
  [[nodiscard]] virtual CopyRun way_to_model(int bucket, const StateView& view) const = 0;
  /// Sends parameters that way; they are there when what comes after finish() runs. Null where they need not go.
  virtual TransferPtr publish(const CopyRun& way) = 0;
  /// Makes the caller's later device work start after all that was published.
  virtual void finish() = 0;
  /// The opposite of publish: the model's values of elements within the view's become what the update reads.
  virtual void fetch(int bucket, const StateView& view, const ElementRange& elements) = 0;
  /// Copies between state memory of this path and a device tensor.
  virtual void read_state(void* device_to, const void* state_from, std::size_t nbytes) = 0;
  virtual void write_state(void* state_to, const void* device_from, std::size_t nbytes) = 0;
  /// The same with host memory.
  virtual void state_to_host(void* host_to, const void* state_from, std::size_t nbytes) = 0;
  virtual void state_from_host(void* state_to, const void* host_from, std::size_t nbytes) = 0;
  /// Sets state memory to zero bytes.
  virtual void zero_state(void* state, std::size_t nbytes) = 0;
};

[[nodiscard]] std::unique_ptr<UpdatePath> make_device_path(Device& device);
/// `shard(b)` is this rank's part of bucket b's flat parameter tensor. `up` must outlive the path.
/// Parameters that `rests_in_host_memory` stay where the update leaves them; nothing then travels up, and fetch() takes
/// the model's values only while the bucket is whole. Its updates run on at most `most_threads`; 0: all of torch's.
[[nodiscard]] std::unique_ptr<UpdatePath> make_host_path(Device& device, std::function<at::Tensor(int)> shard,
                                                         Mover& up, std::function<bool(int)> rests_in_host_memory,
                                                         std::function<bool(int)> is_whole, int most_threads);

}  // namespace pannier
