// Where the gradients of an accumulation window rest until the update reads them: on the device, or in host memory when
// the update happens there. Of each parameter it is this rank's piece. One micro-batch's gradient stays in its own
// type; as soon as there is a second, the sum is fp32, wherever it rests, so that the home never changes a bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "pannier/base/units.h"
#include "pannier/device/device.h"
#include "pannier/device/mover.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/shard_layout.h"
#include "pannier/mem/host_slab.h"

namespace pannier {

/// The gradient of this rank's piece of a parameter as it rests, flat, in the parameter's own order of elements.
struct GradientView {
  void* data = nullptr;  ///< Null: nothing has arrived in this window.
  kernels::GradType type = kernels::GradType::kFp32;
};

/// How gradients add up.
struct GradientStoreOptions {
  kernels::GradType type = kernels::GradType::kFp32;  ///< Of one micro-batch.
  bool accumulates = false;                           ///< More than one micro-batch is expected.
  bool sum_in_own_type = false;                       ///< The user asked for 16-bit sums.
};

/// Holds the gradients of all parameters. One thread at a time.
class GradientStore {
 public:
  GradientStore() = default;
  virtual ~GradientStore() = default;
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;

  /// Takes one micro-batch's gradient of a parameter, a flat device tensor in the gradient's own type that nobody else
  /// writes, and adds it to the window's. `last`: no further micro-batch is expected, so a first one may stay in its
  /// type.
  virtual void add(int parameter, at::Tensor gradient, bool last) = 0;
  /// All gradients of a bucket that this backward gives were added: what goes to the host may set out.
  virtual void flush(int bucket) = 0;
  /// Where a parameter's gradient rests. The host waits until it has arrived there.
  [[nodiscard]] virtual GradientView view(int parameter) = 0;
  /// Whether it rests on the device.
  [[nodiscard]] virtual bool is_on_device(int parameter) const = 0;
  /// Replaces a gradient that there is by `flat`, a device tensor of the view's type.
  virtual void write(int parameter, const at::Tensor& flat) = 0;
  /// An fp32 copy of a gradient that there is, flat, on the device.
  [[nodiscard]] virtual at::Tensor read(int parameter) = 0;
  /// Forgets a parameter's gradient and lets device memory go.
  virtual void drop(int parameter) = 0;
  /// Lets go of device memory whose content has arrived on the host; with `wait`, of all that was sent there.
  virtual void free_sent(bool wait) = 0;
};

[[nodiscard]] std::unique_ptr<GradientStore> make_device_gradients(Device& device, int num_parameters,
                                                                   GradientStoreOptions options);

/// Gradients in one host slab, laid out as the shards are, to which `down` carries them.
class HostGradients final : public GradientStore {
 public:
  /// What it refers to must outlive the store. Throws OutOfMemoryError.
  HostGradients(Device& device, HostMemory& memory, const ShardLayout& shards, GradientStoreOptions options,
                Mover& down);
  ~HostGradients() override;
  HostGradients(const HostGradients&) = delete;
  HostGradients& operator=(const HostGradients&) = delete;

  void add(int parameter, at::Tensor gradient, bool last) override;
  void flush(int bucket) override;
  [[nodiscard]] GradientView view(int parameter) override;
  [[nodiscard]] bool is_on_device(int /*parameter*/) const override { return false; }
  void write(int parameter, const at::Tensor& flat) override;
  [[nodiscard]] at::Tensor read(int parameter) override;
  void drop(int parameter) override;
  void free_sent(bool wait) override;
  [[nodiscard]] std::span<std::byte> bytes() noexcept { return slab_.data(); }

 private:
  /// What the window holds of a parameter.
  enum class Held : std::uint8_t { kNothing, kOwnType, kFp32Sum };
  /// Copies that wait for their bucket's flush, or are on their way.
  struct Way {
    std::vector<CopyRun> runs;
    std::vector<at::Tensor> sources;
    TransferPtr transfer;
  };

  [[nodiscard]] HostSlab make_slab(std::int64_t numel, std::size_t width);
  [[nodiscard]] void* own_type(std::size_t i) { return slab_.data().data() + nbytes_of(offsets_[i], width_); }
  [[nodiscard]] at::Tensor own_type_tensor(std::size_t i);
  [[nodiscard]] float* fp32_sum(std::size_t i);
  void widen(std::size_t i);
  void arrive(int bucket);

  Device& device_;
  HostMemory& memory_;
  const ShardLayout& shards_;
  GradientStoreOptions options_;
  Mover& down_;
  std::vector<Held> held_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int64_t> numels_;
  std::size_t width_ = 4;
  HostSlab slab_;
  HostSlab sums_;
  std::vector<Way> ways_;  ///< By bucket.
  CpuCompute compute_;
};

/// Sends each parameter's gradient to one of two stores, as its bucket's route says. What it refers to must outlive it.
[[nodiscard]] std::unique_ptr<GradientStore> make_routed_gradients(GradientStore& device, GradientStore& host,
                                                                   const BucketLayout& layout,
                                                                   std::function<bool(int)> goes_to_host);

}  // namespace pannier
