// This rank's shards of the parameters on a disk: a store of chunks (nvme_state_store.h) that hold nothing but the
// parameter. Chunks come from the disk into staging memory and go up to the device from there, and the way back. Which
// buckets will be asked for is known, so the disk reads ahead of the device as far as there is staging memory.
#pragma once

#include <vector>

#include "pannier/tier/nvme_state_store.h"
#include "pannier/tier/parameter_shards.h"

namespace pannier {

/// Shards whose home is kNvme. Every call may throw IoError, also of an earlier write, which is then tried again; the
/// call may be made again.
class NvmeShards final : public ParameterShards {
 public:
  /// What it refers to must outlive it. The options' label is asked in elements of a shard. Throws what NvmeStateStore
  /// throws.
  NvmeShards(Device& device, HostMemory& memory, Mover& up, Mover& down, const std::vector<RestingShard>& shards,
             const NvmeStateOptions& options);

  [[nodiscard]] Home home() const noexcept override { return Home::kNvme; }
  /// Begins to read the shard from the disk; finish_raise() waits for the disk.
  void raise(int bucket, const at::Tensor& to) override;
  void finish_raise(int bucket) override;
  void expect(std::vector<int> buckets) override;
  /// Waits for the device, not for the disk.
  void store(int bucket, const at::Tensor& from) override;
  [[nodiscard]] at::Tensor own(int bucket) override;
  [[nodiscard]] at::Tensor own_anew(int bucket) override;
  void put_back(int bucket) override;
  /// A raise() that was not finished is given up.
  void settle(int bucket) override;
  [[nodiscard]] std::byte* host_address(int /*bucket*/) override { return nullptr; }
  [[nodiscard]] std::span<std::byte> host_bytes() override { return {}; }

  [[nodiscard]] NvmeStateStore& disk() noexcept { return disk_; }
  /// What the disk counts as an element.
  [[nodiscard]] std::size_t unit_nbytes() const noexcept { return unit_nbytes_; }

 private:
  struct Slot {
    at::Tensor to;     ///< Where raise() was told to copy; undefined after finish_raise().
    TransferPtr read;  ///< The last way up.
    at::Tensor lent;   ///< What own() gave.
  };
  [[nodiscard]] at::Tensor new_shard(int bucket);
  [[nodiscard]] std::vector<CopyRun> run_of(const at::Tensor& flat, const StateView& view, bool is_up) const;
  [[nodiscard]] Slot& at(int bucket) { return slots_.at(static_cast<std::size_t>(bucket)); }
  void expect_chunks();
  void end_raise(int bucket);

  Device& device_;
  Mover& up_;
  Mover& down_;
  std::vector<RestingShard> shards_;
  std::size_t unit_nbytes_;
  std::vector<Slot> slots_;
  std::vector<int> rising_;    ///< Buckets that were raised, in that order.
  std::vector<int> expected_;  ///< Those that come after them.
  NvmeStateStore disk_;
};

/// Shards of several types share one file, which counts in units of the narrowest type: its bytes, and each shard's
/// size in units.
[[nodiscard]] std::size_t unit_nbytes_of(const std::vector<RestingShard>& shards);
[[nodiscard]] std::vector<std::int64_t> in_units(const std::vector<RestingShard>& shards);

/// Bytes per element of a parameter that rests on a disk by itself.
[[nodiscard]] constexpr StateShape parameter_shape(std::size_t param_nbytes) noexcept {
  return {.param_nbytes = param_nbytes, .rest_nbytes = 0, .num_states = 0};
}

}  // namespace pannier
