// The metered CPU with a look at every copy that a mover makes: tests count them, hold them back and let them fail.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pannier/device/device.h"

namespace pannier {

class WatchedDevice final : public Device {
 public:
  /// Called before each copy in a queue, by the mover's thread; may wait or throw.
  std::function<void(Queue, void* to, std::size_t nbytes)> before_copy;
  std::atomic<int> num_up = 0;    ///< Copies in Queue::kUp.
  std::atomic<int> num_down = 0;  ///< Copies in Queue::kDown.

  void copy(Queue queue, void* to, const void* from, std::size_t nbytes) override {
    if (before_copy) {
      before_copy(queue, to, nbytes);
    }
    (queue == Queue::kUp ? num_up : num_down) += 1;
    cpu_->copy(queue, to, from, nbytes);
  }

  [[nodiscard]] c10::Device torch_device() const override { return cpu_->torch_device(); }
  [[nodiscard]] std::string name() const override { return cpu_->name(); }
  [[nodiscard]] at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, Owner owner) override {
    return cpu_->allocate(numel, dtype, owner);
  }
  void copy_to_host(void* host, const void* device, std::size_t nbytes) override {
    cpu_->copy_to_host(host, device, nbytes);
  }
  void copy_to_device(void* device, const void* host, std::size_t nbytes) override {
    cpu_->copy_to_device(device, host, nbytes);
  }
  void copy_on_device(void* to, const void* from, std::size_t nbytes) override {
    cpu_->copy_on_device(to, from, nbytes);
  }
  void fill_zero(void* device, std::size_t nbytes) override { cpu_->fill_zero(device, nbytes); }
  void add_to_host(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) override {
    cpu_->add_to_host(sum, grad, type, numel, first);
  }
  [[nodiscard]] Compute& compute() override { return cpu_->compute(); }
  [[nodiscard]] std::unique_ptr<GradientJudge> make_judge() override { return cpu_->make_judge(); }
  [[nodiscard]] EventPtr record(Queue queue) override { return cpu_->record(queue); }
  void wait(Queue queue, const EventPtr& event) override { cpu_->wait(queue, event); }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory, std::string& why) override {
    return cpu_->register_host(memory, why);
  }
  [[nodiscard]] EventPtr record_time(Queue queue) override { return cpu_->record_time(queue); }
  [[nodiscard]] double seconds_between(const EventPtr& begin, const EventPtr& end) const override {
    return cpu_->seconds_between(begin, end);
  }
  [[nodiscard]] std::uint64_t begin_range(const char* what, int index) override {
    return cpu_->begin_range(what, index);
  }
  void end_range(std::uint64_t range) noexcept override { cpu_->end_range(range); }
  [[nodiscard]] LinkRates measure_links(double most_seconds) override { return cpu_->measure_links(most_seconds); }
  [[nodiscard]] std::optional<std::size_t> free_nbytes() const override { return cpu_->free_nbytes(); }
  [[nodiscard]] std::unique_ptr<Subscription> when_short(std::function<bool()> give_back) override {
    return cpu_->when_short(std::move(give_back));
  }
  void attach_thread() override { cpu_->attach_thread(); }
  [[nodiscard]] DeviceMemory memory() const override { return cpu_->memory(); }
  void reset_peak() override { cpu_->reset_peak(); }
  [[nodiscard]] std::size_t take_peak() override { return cpu_->take_peak(); }
  void add_memory_cap(std::size_t nbytes) override { cpu_->add_memory_cap(nbytes); }
  void remove_memory_cap(std::size_t nbytes) noexcept override { cpu_->remove_memory_cap(nbytes); }
  void start_timeline() override { cpu_->start_timeline(); }
  [[nodiscard]] std::vector<MemorySample> take_timeline() override { return cpu_->take_timeline(); }
  void reassign(const at::Tensor& tensor, Owner owner) override { cpu_->reassign(tensor, owner); }
  [[nodiscard]] bool counts(const at::Tensor& tensor) const override { return cpu_->counts(tensor); }

 private:
  std::unique_ptr<Device> cpu_ = make_metered_cpu();
};

}  // namespace pannier
