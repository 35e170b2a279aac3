// What the states of this rank's shards were at one moment, read by another thread while training goes on. Nothing is
// copied in advance: the thread reads chunk after chunk, in the order in which the next update will visit them, and an
// update that comes to a chunk first waits until it was read. So a snapshot takes no memory but its reader's buffers.
//  1. The engine's thread makes the snapshot while everything is at rest.
//  2. The reader calls visit(), once. Chunks on a disk it reads by itself; those that an update has read in the
//     meantime, and waits with, it takes from the update's own buffer.
//  3. Every lease for an update is held back as long as it must be. When the reader has ended, well or badly, nothing
//     is.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/base/random_delay.h"
#include "pannier/mem/host_slab.h"
#include "pannier/optim/update_pipeline.h"
#include "pannier/tier/nvme_state_store.h"

namespace pannier {

/// Elements of one parameter as they were, as fp32.
struct SnapshotRun {
  int parameter = 0;
  std::span<const float> master;
  std::array<std::span<const float>, 2> states{};  ///< In the order of the pipeline's state_names().
};

/// How to make one.
struct StateSnapshotOptions {
  NvmeStateStore* nvme = nullptr;  ///< The store of chunks that rest on a disk, if any do.
  std::uint64_t delay_seed = 0;    ///< Not 0: sleeps a random while before each chunk, to shake races out.
};

/// One snapshot. Made and destroyed by the engine's thread; what it refers to must outlive it.
class StateSnapshot {
 public:
  /// What it takes of host memory; `chunk_nbytes`: of a chunk on the disk, 0 where there is none.
  [[nodiscard]] static std::size_t nbytes(std::size_t chunk_nbytes);
  /// Nothing may be on its way anywhere. Throws OutOfMemoryError.
  StateSnapshot(UpdatePipelineParts& parts, HostMemory& memory, const StateSnapshotOptions& options);
  /// The reader must have ended.
  ~StateSnapshot();
  StateSnapshot(const StateSnapshot&) = delete;
  StateSnapshot& operator=(const StateSnapshot&) = delete;

  /// This rank's pieces, in the order in which they are read.
  [[nodiscard]] std::vector<ShardPiece> pieces() const;
  /// The reader: calls `use` for all elements of pieces(), in order. Throws what `use` throws; IoError; ConfigError
  /// where somebody wrote into a parameter before it was read.
  void visit(const std::function<void(const SnapshotRun&)>& use);
  /// The reader has ended, whether visit() was called or not: nobody waits for it any more.
  void end() noexcept;

  /// The engine's thread is about to update chunks, in order; and has done so, for this time.
  void begin_updates() noexcept;
  void end_updates() noexcept;
  /// Waits until everything was read.
  void wait_read() noexcept;
  /// How long the engine's thread has waited so far.
  [[nodiscard]] double waited_s() const;

 private:
  struct Source {
    ChunkId chunk;
    std::optional<StateView> states;   ///< Empty: on the disk.
    const std::byte* param = nullptr;  ///< Null: in the states' view.
    bool is_param_on_device = false;
    const UpdateRoutes::Way* way = nullptr;
    std::vector<std::pair<int, std::int64_t>> versions{};  ///< Of parameters that somebody might write into.
  };
  struct Apart {
    std::span<std::byte> memory;
    std::optional<ExtentTransfer> transfer;
  };

  void add_bucket(int bucket);
  void watch(StateStore& store);
  void hold_back(ChunkId chunk, const StateView* lent) noexcept;
  void wait_until_read(std::unique_lock<std::mutex>& lock, std::size_t num_read) noexcept;
  [[nodiscard]] StateView states_of(std::size_t source);
  void begin_read(std::size_t source);
  void visit_source(const Source& source, const StateView& view, const std::function<void(const SnapshotRun&)>& use);
  [[nodiscard]] SnapshotRun read_run(const Source& source, const StateView& view, const ShardPiece& piece,
                                     const ElementRange& elements);
  [[nodiscard]] const float* as_host(const void* from, bool is_on_device, std::span<float> room, std::int64_t numel);
  void require_unchanged(const Source& source) const;

  UpdatePipelineParts& parts_;
  NvmeStateStore* nvme_;
  RandomDelay delay_;  ///< Of the reader alone.
  HostSlab memory_;
  std::array<std::span<float>, 3> room_;
  std::array<std::span<std::uint16_t>, 2> halves_;
  std::array<Apart, 2> apart_;
  std::vector<at::Tensor> kept_;  ///< So that addresses stay.
  EventPtr ready_;
  std::vector<Source> sources_;
  std::vector<std::int64_t> first_source_;  ///< By bucket; -1: none.
  std::vector<StateStore*> watched_;

  mutable std::mutex progress_mutex_;  ///< Guards everything below.
  std::condition_variable progress_changed_;
  std::size_t num_read_ = 0;
  bool has_ended_ = false;
  bool is_updating_ = false;
  std::optional<std::size_t> wanted_;  ///< The source that the engine's thread waits for,
  std::optional<StateView> lent_;      ///< and its states, if they are in memory there.
  double waited_s_ = 0.0;
};

/// While it lives, the engine's thread updates chunks in order. `snapshot` may be null.
class SnapshotUpdates {
 public:
  explicit SnapshotUpdates(StateSnapshot* snapshot) noexcept : snapshot_(snapshot) {
    if (snapshot_ != nullptr) {
      snapshot_->begin_updates();
    }
  }
  ~SnapshotUpdates() {
    if (snapshot_ != nullptr) {
      snapshot_->end_updates();
    }
  }
  SnapshotUpdates(const SnapshotUpdates&) = delete;
  SnapshotUpdates& operator=(const SnapshotUpdates&) = delete;

 private:
  StateSnapshot* snapshot_;
};

}  // namespace pannier
