// Optimizer state on a disk. A chunk is one extent of the rank's scratch file; a fixed number of staging buffers, each
// of which holds one chunk, is all the host memory that it takes, whatever the size of the model. Chunks that are
// expected are read ahead into buffers that are free, a chunk that was updated is written behind the caller's back, and
// its buffer is free again when the disk has acknowledged it. So reading, updating and writing overlap, in any order of
// leases:
//  1. A buffer is free, reading, clean (the disk has the same), lent, writing, or dirty (its write failed).
//  2. What is in a buffer is lent from there, never read from the disk: what was lent last comes for nothing next.
//  3. A chunk's checksum is the sum over its tiles, each of some elements with all their arrays: an update computes it
//  in
//     the same pass (kTiles), everything else in a pass of its own.
//  4. A write that failed keeps its buffer. The next call tries it again and throws the error; the one after that finds
//     it written, or throws again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pannier/io/extent_file.h"
#include "pannier/io/folder_lock.h"
#include "pannier/io/io_engine.h"
#include "pannier/io/staging.h"
#include "pannier/tier/nvme_staging.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// What a store on a disk has done and holds.
struct NvmeStats {
  std::size_t file_nbytes = 0;
  std::uint64_t read_nbytes = 0;
  std::uint64_t written_nbytes = 0;
};

/// State on one or several disks. One thread. In a forked child it must not be used.
class NvmeStateStore final : public StateStore {
 public:
  /// Takes the folders' locks, sets the file aside and maps the staging memory. Throws what FolderLock, DiskFile and
  /// StagingPool throw. `memory` must outlive the store. `params`: where the host has a bucket's parameters anyway, so
  /// that the disk holds no copy; null, or empty: nowhere.
  NvmeStateStore(HostMemory& memory, const StateShape& shape, const std::vector<std::int64_t>& bucket_numels,
                 const NvmeStateOptions& options, std::vector<std::byte*> params = {});
  ~NvmeStateStore() override;

  [[nodiscard]] Home home() const noexcept override { return Home::kNvme; }
  void expect(std::vector<ChunkId> order) override;
  [[nodiscard]] bool keeps_last() const noexcept override { return true; }
  [[nodiscard]] std::int64_t tile_numel() const noexcept override;
  [[nodiscard]] std::uint64_t tile_sum(ChunkId chunk, std::int64_t tile) const override;
  void confirm(ChunkId chunk, std::uint64_t before, std::uint64_t after) override;
  void check() override;
  void settle() override;

  [[nodiscard]] std::optional<StateView> resting(ChunkId chunk) override;
  /// Starts to read a chunk that rests on the disk, for another thread than the store's. Nobody may update the chunk
  /// before the transfer has ended. `to`: aligned memory for a chunk.
  [[nodiscard]] ExtentTransfer read_apart(ChunkId chunk, std::span<std::byte> to) {
    return extents_->read(extent_of(chunk), to, Verify::kByCaller);
  }
  /// Throws ChecksumError unless what that read is what was written.
  void verify_apart(ChunkId chunk, const std::byte* states) const {
    extents_->verify(extent_of(chunk), sum_of(chunk, states));
  }
  /// The view of what that reads.
  [[nodiscard]] StateView view_apart(ChunkId chunk, std::byte* states) const { return view_at(chunk, states); }

  /// The staging memory and what stays in host memory, in spans under 1 GiB, for registration with a device.
  [[nodiscard]] std::vector<std::span<std::byte>> regions();
  [[nodiscard]] NvmeStats stats() const;
  [[nodiscard]] const NvmeStaging& staging() const noexcept { return staging_; }
  /// What a user should know about disk and engine, a sentence each.
  [[nodiscard]] std::vector<std::string> notes() const;

 protected:
  [[nodiscard]] StateView acquire(ChunkId chunk, Access access) override;
  void release(ChunkId chunk, Access access, TransferPtr reader) noexcept override;

 private:
  enum class Use : std::uint8_t { kFree, kReading, kClean, kLent, kWriting, kDirty };
  struct Slot {
    StagingBuffer buffer;
    Use use = Use::kFree;
    bool is_unsaved = false;                          ///< Lent while dirty.
    bool is_checked = true;                           ///< What the disk gave is what was written to it.
    std::optional<std::uint64_t> sum = std::nullopt;  ///< Of what was confirmed.
    std::size_t extent = 0;
    std::uint64_t lent_at = 0;  ///< Counts leases: the last of what is in it.
    std::optional<ExtentTransfer> transfer;
    TransferPtr reader;  ///< Somebody else who reads the buffer, or null.
  };

  [[nodiscard]] std::size_t extent_of(ChunkId chunk) const;
  [[nodiscard]] bool rests_in_memory(std::size_t extent) const noexcept { return extent < staging_.host_chunks; }
  [[nodiscard]] std::byte* param_of(int bucket) const {
    return params_.empty() ? nullptr : params_[static_cast<std::size_t>(bucket)];
  }
  [[nodiscard]] StateShape shape_of(int bucket) const;
  [[nodiscard]] StateView view_at(ChunkId chunk, std::byte* states) const;
  [[nodiscard]] std::size_t wait_order(std::size_t extent) const;
  [[nodiscard]] bool is_later(const Slot& slot, const Slot& other) const;
  [[nodiscard]] Slot* slot_with(std::size_t extent);
  [[nodiscard]] std::uint64_t tile_sum(ChunkId chunk, const std::byte* states, std::int64_t tile) const;
  Slot* try_take_slot(std::size_t wanted_in);
  Slot& take_slot();
  void wait_for_any_slot();
  void free(Slot& slot) noexcept;
  void begin_read(Slot& slot, std::size_t extent);
  void fill_later(Slot& slot, std::size_t extent);
  void finish_read(Slot& slot);
  [[nodiscard]] std::uint64_t sum_of(ChunkId chunk, const std::byte* states) const;
  [[nodiscard]] std::uint64_t sum_of(const Slot& slot) const;
  void check(Slot& slot);
  void begin_write(Slot& slot);
  void finish_write(Slot& slot) noexcept;
  void collect() noexcept;
  void raise_failed();
  void read_ahead() noexcept;
  void read_ahead_while_room();
  void pass(std::size_t extent) noexcept;

  StateShape shape_;
  NvmeStaging staging_;
  std::vector<std::byte*> params_;
  ParallelFor parallel_for_;
  std::vector<ChunkId> chunk_at_;          ///< By extent.
  std::vector<std::size_t> first_extent_;  ///< By bucket. Extents are in the order in which a step visits them.
  std::vector<FolderLock> locks_;
  DiskFile file_;
  StagingPool pool_;
  HostSlab host_;
  std::unique_ptr<IoEngine> engine_;
  std::unique_ptr<ExtentFile> extents_;
  std::vector<Slot> slots_;
  std::vector<int> slot_of_;              ///< By extent; -1: none.
  std::vector<std::size_t> expected_;     ///< Extents.
  std::size_t next_expected_ = 0;         ///< Those before it have been lent.
  std::vector<std::size_t> position_of_;  ///< By extent: its place among those expected.
  std::uint64_t num_lent_ = 0;
  std::exception_ptr failed_;  ///< The first error of a write that nobody has been told of.
};

}  // namespace pannier
