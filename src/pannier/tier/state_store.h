// Where every shard's state rests. A store owns the optimizer state of all buckets in one home and lends it a chunk (a
// run of a shard's elements) at a time: a lease makes the chunk's state addressable by the processor that will update
// it, and gives it back when it ends. On the device and in host memory a bucket is one chunk and a lease only an
// address; a store on a disk, whose memory holds a few chunks at a time, reads ahead and writes behind.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/layout/home.h"
#include "pannier/layout/state_shape.h"
#include "pannier/mem/host_slab.h"
#include "pannier/tier/state_view.h"

namespace pannier {

class StateStore;

/// The right to use one chunk's state until destruction. Move-only; must not outlive its store.
class [[nodiscard]] Lease {
 public:
  Lease(StateStore& store, ChunkId chunk, Access access, const StateView& view) noexcept
      : store_(&store), chunk_(chunk), access_(access), view_(view) {}
  Lease(Lease&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)),
        chunk_(other.chunk_),
        access_(other.access_),
        view_(other.view_),
        reader_(std::move(other.reader_)) {}
  Lease& operator=(Lease&&) = delete;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();
  [[nodiscard]] const StateView& view() const noexcept { return view_; }
  [[nodiscard]] ChunkId chunk() const noexcept { return chunk_; }
  /// A transfer reads the chunk's memory, maybe beyond the lease's end; null: none does.
  void is_read_by(TransferPtr reader) noexcept { reader_ = std::move(reader); }

 private:
  StateStore* store_;
  ChunkId chunk_;
  Access access_;
  StateView view_;
  TransferPtr reader_;
};

/// Owns the optimizer state of all buckets. One thread.
class StateStore {
 public:
  /// Chunks have `chunk_numel` elements, the last of a bucket what is left; without it a bucket is one.
  explicit StateStore(std::vector<std::int64_t> bucket_numels,
                      std::int64_t chunk_numel = std::numeric_limits<std::int64_t>::max());
  virtual ~StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  [[nodiscard]] virtual Home home() const noexcept = 0;
  [[nodiscard]] int num_buckets() const noexcept { return static_cast<int>(bucket_numels_.size()); }
  /// How many chunks a bucket's shard has; 0 where it has no elements.
  [[nodiscard]] int num_chunks(int bucket) const;
  /// The elements of the shard that are in a chunk.
  [[nodiscard]] ElementRange range(ChunkId chunk) const;
  /// The chunk that holds an element of a bucket's shard.
  [[nodiscard]] ChunkId chunk_of(int bucket, std::int64_t element) const;

  /// Makes a chunk's state addressable. A chunk is leased once at a time; throws InternalError otherwise. A store on a
  /// disk throws IoError, also one of an earlier chunk's writing.
  [[nodiscard]] Lease lease(ChunkId chunk, Access access = Access::kUpdate);
  /// The same of a bucket that is one chunk.
  [[nodiscard]] Lease lease(int bucket) { return lease(ChunkId{bucket, 0}); }
  /// Whether a lease of a bucket's first chunk would be given without waiting.
  [[nodiscard]] virtual bool is_ready(int /*bucket*/) const { return true; }
  /// Says which chunks will be leased next, in which order, so that they can be read ahead. Others may be leased too.
  virtual void expect(std::vector<ChunkId> /*order*/) {}
  /// Whether the chunks that were lent last are the cheapest to lend next.
  [[nodiscard]] virtual bool keeps_last() const noexcept { return false; }
  /// Called with each lease for an update, before it is given: whoever still reads the chunk's state holds the caller
  /// back until he has. Must not throw. Null: nobody reads.
  void before_update(std::function<void(ChunkId chunk, const StateView& view)> call) {
    before_update_ = std::move(call);
  }
  /// Where a chunk's states rest in memory, under addresses that stay; `param` is null where the store has no copy of
  /// it. Nothing for a chunk that rests elsewhere.
  [[nodiscard]] virtual std::optional<StateView> resting(ChunkId /*chunk*/) { return std::nullopt; }
  /// Elements of a tile of a chunk: where this is not 0, bytes that come from a disk are checked a tile at a time, and
  /// whoever updates a chunk that was leased with kTiles does it while he has the tile in his cache.
  [[nodiscard]] virtual std::int64_t tile_numel() const noexcept { return 0; }
  /// What a tile of a leased chunk adds to its sum. Thread-safe, while nothing else is called.
  [[nodiscard]] virtual std::uint64_t tile_sum(ChunkId /*chunk*/, std::int64_t /*tile*/) const { return 0; }
  /// The sums over all tiles of a chunk that was leased with kTiles, before and after its update. Throws ChecksumError
  /// where the disk gave something else than was written: the chunk is not what it says, and is dropped.
  virtual void confirm(ChunkId /*chunk*/, std::uint64_t /*before*/, std::uint64_t /*after*/) {}
  /// Throws IoError where something that was given back could not be put to rest, once, and tries it again.
  virtual void check() {}
  /// Waits until all that was given back is at rest. Throws as check().
  virtual void settle() {}

 protected:
  [[nodiscard]] virtual StateView acquire(ChunkId chunk, Access access) = 0;
  virtual void release(ChunkId chunk, Access access, TransferPtr reader) noexcept = 0;

 private:
  friend class Lease;
  std::vector<std::int64_t> bucket_numels_;
  std::int64_t chunk_numel_;
  std::vector<std::vector<bool>> leased_;
  std::function<void(ChunkId, const StateView&)> before_update_;
};

/// State on the device beside the parameters. `param_bucket(b)` is bucket b's flat parameter tensor, which the view's
/// `param` points to, asked for at each lease. A bucket's states are allocated, zero, by its first lease, which may
/// throw torch's out-of-memory error.
[[nodiscard]] std::unique_ptr<StateStore> make_device_store(Device& device, const StateShape& shape,
                                                            std::vector<std::int64_t> bucket_numels,
                                                            std::function<at::Tensor(int)> param_bucket);

/// State in one exact-size host slab, with a copy of the parameter, unless its shard rests in host memory anyway.
/// Starts as zero; the copy is filled by its first writer.
class HostStateStore final : public StateStore {
 public:
  /// `params`: where the host has a bucket's parameters already; null, or empty: nowhere. `memory` must outlive the
  /// store. Throws OutOfMemoryError.
  HostStateStore(HostMemory& memory, const StateShape& shape, const std::vector<std::int64_t>& bucket_numels,
                 const std::vector<std::byte*>& params = {});

  [[nodiscard]] Home home() const noexcept override { return Home::kHost; }
  /// Called with the bucket before each lease: whoever has lent its state elsewhere brings it back.
  void before_lease(std::function<void(int)> recall) { recall_ = std::move(recall); }
  [[nodiscard]] std::optional<StateView> resting(ChunkId chunk) override { return view(chunk.bucket); }
  /// Where a bucket's state rests.
  [[nodiscard]] const StateView& view(int bucket) const { return views_.at(static_cast<std::size_t>(bucket)); }
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return slab_.data(); }

 protected:
  [[nodiscard]] StateView acquire(ChunkId chunk, Access access) override;
  void release(ChunkId /*chunk*/, Access /*access*/, TransferPtr /*reader*/) noexcept override {}

 private:
  HostSlab slab_;
  std::vector<StateView> views_;
  std::function<void(int)> recall_;
};

}  // namespace pannier
