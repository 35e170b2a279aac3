// Where the model computes. A Device allocates tensors for an owner, copies to and from host memory, counts its memory
// and runs the kernels. CUDA is one; the metered CPU is another, on which the whole product runs and is measured
// without a GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pannier/device/compute.h"
#include "pannier/device/memory_meter.h"

namespace pannier {

/// A device. Copies are ordered after the device work before them; those of the CPU have finished when they return.
class Device {
 public:
  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] virtual c10::Device torch_device() const = 0;
  /// For messages: "metered CPU".
  [[nodiscard]] virtual std::string name() const = 0;
  /// A flat, uninitialised tensor that counts for `owner`. Throws torch's out-of-memory error.
  [[nodiscard]] virtual at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, Owner owner) = 0;
  virtual void copy_to_host(void* host, const void* device, std::size_t nbytes) = 0;
  virtual void copy_to_device(void* device, const void* host, std::size_t nbytes) = 0;
  virtual void copy_on_device(void* to, const void* from, std::size_t nbytes) = 0;
  virtual void fill_zero(void* device, std::size_t nbytes) = 0;
  /// Adds a gradient on the device to an fp32 sum in host memory, or sets it where `first`.
  virtual void add_to_host(float* host_sum, const void* device_grad, kernels::GradType type, std::int64_t numel,
                           bool first) = 0;
  [[nodiscard]] virtual Compute& compute() = 0;

  [[nodiscard]] virtual DeviceMemory memory() const = 0;
  virtual void reset_peak() = 0;
  /// Limits the device's memory; of several caps the least counts. Throws ConfigError if more is in use already.
  virtual void add_memory_cap(std::size_t nbytes) = 0;
  virtual void remove_memory_cap(std::size_t nbytes) noexcept = 0;
  virtual void start_timeline() = 0;
  [[nodiscard]] virtual std::vector<MemorySample> take_timeline() = 0;
  /// Counts the tensor's memory for `owner` from now on, whoever allocated it.
  virtual void reassign(const at::Tensor& tensor, Owner owner) = 0;
  /// Whether memory of this tensor was counted; a parameter that was not is copied into memory that is.
  [[nodiscard]] virtual bool counts(const at::Tensor& tensor) const = 0;
};

/// The CPU as a device with counted memory.
[[nodiscard]] std::unique_ptr<Device> make_metered_cpu();

}  // namespace pannier
