// Where the model computes. A Device allocates tensors for an owner, copies to and from host memory, counts its memory
// and runs the kernels. CUDA is one; the metered CPU is another, on which the whole product runs and is measured
// without a GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pannier/device/compute.h"
#include "pannier/device/gradient_judge.h"
#include "pannier/device/memory_meter.h"
#include "pannier/device/step_trace.h"
#include "pannier/hardware/rates.h"

namespace pannier {

/// Orders of work. kCompute is the calling thread's current stream, where the model runs; kUp and kDown carry transfers
/// to and from the device beside it.
enum class Queue : std::uint8_t { kCompute, kUp, kDown };

/// A point in a queue that was reached when the work before it is done. Thread-safe.
class Event {
 public:
  Event() = default;
  virtual ~Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  [[nodiscard]] virtual bool is_done() const = 0;
  /// The host waits, without spinning.
  virtual void wait() const = 0;
};
using EventPtr = std::shared_ptr<const Event>;

/// Host memory that transfers may read and write while the host goes on; ends at destruction.
class Registration {
 public:
  Registration() = default;
  virtual ~Registration() = default;
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
};

/// Something that was asked for until destruction.
class Subscription {
 public:
  Subscription() = default;
  virtual ~Subscription() = default;
  Subscription(const Subscription&) = delete;
  Subscription& operator=(const Subscription&) = delete;
};

/// A device. What has no queue among its arguments is ordered after the calling thread's work before it, and the host
/// waits for copies between host and device.
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
  /// The same from any thread, beside the model's work: the caller has waited for what wrote there.
  void copy_down(void* host, const void* device, std::size_t nbytes) {
    copy(Queue::kDown, host, device, nbytes);
    record(Queue::kDown)->wait();
  }
  virtual void copy_to_device(void* device, const void* host, std::size_t nbytes) = 0;
  virtual void copy_on_device(void* to, const void* from, std::size_t nbytes) = 0;
  virtual void fill_zero(void* device, std::size_t nbytes) = 0;
  /// Adds a gradient on the device to an fp32 sum in host memory, or sets it where `first`.
  virtual void add_to_host(float* host_sum, const void* device_grad, kernels::GradType type, std::int64_t numel,
                           bool first) = 0;
  [[nodiscard]] virtual Compute& compute() = 0;
  [[nodiscard]] virtual std::unique_ptr<GradientJudge> make_judge() = 0;

  /// Marks the present end of a queue.
  [[nodiscard]] virtual EventPtr record(Queue queue) = 0;
  /// The same, with the time at which it is reached; and the seconds between two such that are done.
  [[nodiscard]] virtual EventPtr record_time(Queue queue) = 0;
  [[nodiscard]] virtual double seconds_between(const EventPtr& begin, const EventPtr& end) const = 0;
  /// A range of host work for a profiler that listens, such as "update 3"; 0 where none can.
  [[nodiscard]] virtual std::uint64_t begin_range(const char* what, int index) = 0;
  virtual void end_range(std::uint64_t range) noexcept = 0;
  [[nodiscard]] StepTrace& trace() noexcept { return trace_; }
  /// Measures copies to, from and on the device.
  [[nodiscard]] virtual LinkRates measure_links(double most_seconds) = 0;
  /// What is put into the queue from now on starts after the event. On a device without queues the host waits.
  virtual void wait(Queue queue, const EventPtr& event) = 0;
  /// Copies between host and device in a queue's order. The host goes on where the memory is registered.
  virtual void copy(Queue queue, void* to, const void* from, std::size_t nbytes) = 0;
  /// Makes transfers of this host memory fast. Null where it is not needed, or was refused: `reason` then says why.
  [[nodiscard]] virtual std::unique_ptr<Registration> register_host(std::span<std::byte> memory,
                                                                    std::string& reason) = 0;
  /// To be called first on a thread of ours that will use the device.
  virtual void attach_thread() = 0;

  [[nodiscard]] virtual DeviceMemory memory() const = 0;
  virtual void reset_peak() = 0;
  /// The most that was in use since the last call, without streamed states.
  [[nodiscard]] virtual std::size_t take_peak() = 0;
  /// Limits the device's memory; of several caps the least counts. Throws ConfigError if more is in use already.
  virtual void add_memory_cap(std::size_t nbytes) = 0;
  virtual void remove_memory_cap(std::size_t nbytes) noexcept = 0;
  /// What can still be had; empty: it is the host's memory.
  [[nodiscard]] virtual std::optional<std::size_t> free_nbytes() const = 0;
  /// Until the subscription ends, `give_back` is called when an allocation fails; it says whether it freed anything.
  /// The allocator is locked meanwhile, so it may wait for copies, but for no lock of another thread's. Null where the
  /// device has no such moment.
  [[nodiscard]] virtual std::unique_ptr<Subscription> when_short(std::function<bool()> give_back) = 0;
  virtual void start_timeline() = 0;
  [[nodiscard]] virtual std::vector<MemorySample> take_timeline() = 0;
  /// Counts the tensor's memory for `owner` from now on, whoever allocated it.
  virtual void reassign(const at::Tensor& tensor, Owner owner) = 0;
  /// Whether memory of this tensor was counted; a parameter that was not is copied into memory that is.
  [[nodiscard]] virtual bool counts(const at::Tensor& tensor) const = 0;

 private:
  StepTrace trace_{*this};
};

/// The device that a model's parameters are on. Throws ConfigError for one that is neither CPU nor CUDA, and where the
/// library for CUDA can't be loaded.
[[nodiscard]] std::unique_ptr<Device> make_device(c10::Device device);

/// The CPU as a device with counted memory.
[[nodiscard]] std::unique_ptr<Device> make_metered_cpu();

}  // namespace pannier
