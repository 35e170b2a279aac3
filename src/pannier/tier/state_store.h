// Where every shard's state rests. A store owns the optimizer state of all buckets in one home and lends it a bucket at
// a time: a lease makes the bucket's state addressable by the processor that will update it, and gives it back when it
// ends. On the device and in host memory a lease is only an address; a store on a disk reads ahead and writes behind
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/layout/home.h"
#include "pannier/layout/state_shape.h"
#include "pannier/mem/host_slab.h"

namespace pannier {

/// Addresses of one bucket's state, each an array over the shard's elements; null where the format has none.
struct StateView {
  void* param =
      nullptr;           ///< The parameter as the update reads and writes it: on the device itself, or the host's copy.
  void* rest = nullptr;  ///< The fp32 master of fp16, or `lo` of bf16.
  float* state1 = nullptr;
  float* state2 = nullptr;
};

/// The view of a bucket whose states lie at `states` as `layout` says.
[[nodiscard]] StateView view_of(const StateShape& shape, const HostBucketLayout& layout, std::byte* states,
                                void* param);

class StateStore;

/// The right to use one bucket's state until destruction. Move-only; must not outlive its store.
class [[nodiscard]] Lease {
 public:
  Lease(StateStore& store, int bucket, const StateView& view) noexcept : store_(&store), bucket_(bucket), view_(view) {}
  Lease(Lease&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)), bucket_(other.bucket_), view_(other.view_) {}
  Lease& operator=(Lease&&) = delete;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();
  [[nodiscard]] const StateView& view() const noexcept { return view_; }

 private:
  StateStore* store_;
  int bucket_;
  StateView view_;
};

/// Owns the optimizer state of all buckets. One thread.
class StateStore {
 public:
  StateStore() = default;
  virtual ~StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  [[nodiscard]] virtual Home home() const noexcept = 0;
  /// Makes a bucket's state addressable. A bucket is leased once at a time; throws InternalError otherwise.
  [[nodiscard]] Lease lease(int bucket);
  /// Whether a lease would be given without waiting.
  [[nodiscard]] virtual bool is_ready(int /*bucket*/) const { return true; }

 protected:
  [[nodiscard]] virtual StateView acquire(int bucket) = 0;
  virtual void release(int bucket) noexcept = 0;

 private:
  friend class Lease;
  std::vector<bool> leased_;
};

/// State on the device beside the parameters. `param_bucket(b)` is bucket b's flat parameter tensor, which the view's
/// `param` points to, asked for at each lease. A bucket's states are allocated, zero, by its first lease, which may
/// throw torch's out-of-memory error.
[[nodiscard]] std::unique_ptr<StateStore> make_device_store(Device& device, const StateShape& shape, int num_buckets,
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
  /// Where a bucket's state rests.
  [[nodiscard]] const StateView& view(int bucket) const { return views_.at(static_cast<std::size_t>(bucket)); }
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return slab_.data(); }

 protected:
  [[nodiscard]] StateView acquire(int bucket) override;
  void release(int /*bucket*/) noexcept override {}

 private:
  HostSlab slab_;
  std::vector<StateView> views_;
  std::function<void(int)> recall_;
};

}  // namespace pannier
