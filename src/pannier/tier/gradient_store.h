// Where the gradients of an accumulation window rest until the update reads them: on the device, or in host memory when
// the update happens there. One micro-batch's gradient stays in its own type; as soon as there is a second, the sum is
// fp32, wherever it rests, so that the home never changes a bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/bucket_layout.h"
#include "pannier/mem/host_slab.h"

namespace pannier {

/// A parameter's gradient as it rests, flat, in the parameter's own order of elements.
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
  [[nodiscard]] virtual GradientView view(int parameter) const = 0;
  /// Forgets a parameter's gradient and lets device memory go.
  virtual void drop(int parameter) = 0;
  /// The processor that can read the views.
  [[nodiscard]] virtual Compute& compute() = 0;
};

[[nodiscard]] std::unique_ptr<GradientStore> make_device_gradients(Device& device, int num_parameters,
                                                                   GradientStoreOptions options);

/// Gradients lie in one host slab, as their buckets do. `memory` must outlive the store. Throws OutOfMemoryError.
[[nodiscard]] std::unique_ptr<GradientStore> make_host_gradients(Device& device, HostMemory& memory,
                                                                 const BucketLayout& layout,
                                                                 GradientStoreOptions options);

}  // namespace pannier
