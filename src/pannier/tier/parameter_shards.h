// This rank's shards of the parameters at rest, for buckets that are not whole all the time: on the device, in one
// registered slab of host memory, or on a disk (nvme_shards.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pannier/base/units.h"
#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/layout/home.h"
#include "pannier/mem/host_memory.h"

namespace pannier {

/// This rank's shard of one bucket.
struct RestingShard {
  std::int64_t numel = 0;  ///< 0 where it is not kept here.
  at::ScalarType dtype = at::kFloat;
  [[nodiscard]] std::size_t nbytes() const { return nbytes_of(numel, c10::elementSize(dtype)); }
};

/// Shards of these sizes, all of one type.
[[nodiscard]] std::vector<RestingShard> shards_of_type(at::ScalarType dtype, const std::vector<std::int64_t>& numels);

/// Keeps a shard of each bucket. Shards start as zero. One thread.
class ParameterShards {
 public:
  ParameterShards() = default;
  virtual ~ParameterShards() = default;
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;

  [[nodiscard]] virtual Home home() const noexcept = 0;
  /// Begins to copy a shard into `to`, a device tensor of its size, which must stay until settle() or what comes after
  /// finish_raise() has run. One a bucket at a time.
  virtual void raise(int bucket, const at::Tensor& to) = 0;
  /// What the device does next sees what raise() copies.
  virtual void finish_raise(int bucket) = 0;
  /// Says which buckets will be raised next, in which order.
  virtual void expect(std::vector<int> /*buckets*/) {}
  /// The values of a device tensor become what rests.
  virtual void store(int bucket, const at::Tensor& from) = 0;
  /// The shard on the device, to be read and written there until put_back().
  [[nodiscard]] virtual at::Tensor own(int bucket) = 0;
  /// The same for who will write all of it: its values need not be there.
  [[nodiscard]] virtual at::Tensor own_anew(int bucket) { return own(bucket); }
  /// What own() gave, as it is when the work before this call is done, becomes what rests.
  virtual void put_back(int bucket) = 0;
  /// The host waits until no copy of the shard is under way; one that finish_raise() has not seen may be given up.
  virtual void settle(int bucket) = 0;
  /// The shard's last way down, after which another may read where it rests; null: nothing is on its way.
  [[nodiscard]] virtual TransferPtr on_its_way_down(int /*bucket*/) { return nullptr; }
  /// Somebody else sends the shard down to where it rests.
  virtual void comes_down(int /*bucket*/, TransferPtr /*transfer*/) {}
  /// Called with the bucket before its shard sets out: whoever still writes where it rests ends first.
  void before_raise(std::function<void(int)> call) { before_raise_ = std::move(call); }
  /// Where the shard rests in host memory; null where it does not.
  [[nodiscard]] virtual std::byte* host_address(int bucket) = 0;
  /// All of that memory.
  [[nodiscard]] virtual std::span<std::byte> host_bytes() = 0;

 protected:
  void end_writes(int bucket) const {
    if (before_raise_) {
      before_raise_(bucket);
    }
  }

 private:
  std::function<void(int)> before_raise_;
};

/// What it refers to must outlive it. Throws torch's out-of-memory error.
[[nodiscard]] std::unique_ptr<ParameterShards> make_device_shards(Device& device,
                                                                  const std::vector<RestingShard>& shards);

/// The same in host memory. Throws OutOfMemoryError.
[[nodiscard]] std::unique_ptr<ParameterShards> make_host_shards(Device& device, HostMemory& memory, Mover& up,
                                                                Mover& down, const std::vector<RestingShard>& shards);

}  // namespace pannier
