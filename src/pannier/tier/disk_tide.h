// Lends states that rest on a disk to the device, a chunk at a time: from the disk into staging memory, from there up
// into a buffer on the device, where the chunk is updated, and the same way back. Two chunks are on the device at a
// time, so that one travels while the other is updated; what the disk reads and writes meanwhile is the store's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "pannier/device/mover.h"
#include "pannier/tier/nvme_state_store.h"

namespace pannier {

/// What it works with. Everything must outlive it.
struct DiskTideParts {
  Device& device;
  NvmeStateStore& disk;
  Mover& up;
  Mover& down;
  StateShape shape;
  std::vector<std::int64_t> bucket_numels;
  std::function<at::Tensor(int)> param_bucket;  ///< The bucket's flat parameter on the device.
};

/// A store whose leases are on the device. One thread. Until settle() it holds leases of the disk's.
class DiskTide final : public StateStore {
 public:
  explicit DiskTide(DiskTideParts parts);
  ~DiskTide() override;

  [[nodiscard]] Home home() const noexcept override { return Home::kNvme; }
  [[nodiscard]] bool is_ready(int /*bucket*/) const override { return false; }
  void expect(std::vector<ChunkId> order) override { parts_.disk.expect(std::move(order)); }
  /// Waits until everything is down again, and given back to the disk's store.
  void settle() override;

 protected:
  [[nodiscard]] StateView acquire(ChunkId chunk, Access access) override;
  void release(ChunkId chunk, Access access, TransferPtr reader) noexcept override;

 private:
  struct Slot {
    at::Tensor buffer;
    std::optional<Lease> staged;
    TransferPtr up;
    TransferPtr down;
  };
  static void finish(Slot& slot);
  [[nodiscard]] CopyRun up_run(const Slot& slot) const;

  DiskTideParts parts_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;       ///< The slot that was used longest ago.
  std::exception_ptr broken_;  ///< An error on the way down, which the next call rethrows.
};

}  // namespace pannier
