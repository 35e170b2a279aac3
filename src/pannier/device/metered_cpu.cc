#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "pannier/device/device.h"

namespace pannier {
namespace {

/// Fewest bytes that are worth a second thread in a copy.
constexpr std::int64_t kCopyGrain = std::int64_t{1} << 20;
/// A timeline keeps changes of at least this size.
constexpr std::size_t kTimelineResolution = std::size_t{1} << 20;

// Work has finished when its call returns, so every point in a queue is behind.
class PastEvent final : public Event {
 public:
  const std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  [[nodiscard]] bool is_done() const override { return true; }
  void wait() const override {}
};

class MeteredCpu final : public Device {
 public:
  [[nodiscard]] c10::Device torch_device() const override { return c10::Device(c10::DeviceType::CPU); }
  [[nodiscard]] std::string name() const override { return "metered CPU"; }

  [[nodiscard]] at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, Owner owner) override {
    const OwnerScope scope(owner);
    return at::empty({numel}, at::TensorOptions().dtype(dtype));
  }

  void copy_to_host(void* host, const void* device, std::size_t nbytes) override { copy(host, device, nbytes); }
  void copy_to_device(void* device, const void* host, std::size_t nbytes) override { copy(device, host, nbytes); }

  void copy_on_device(void* to, const void* from, std::size_t nbytes) override { copy(to, from, nbytes); }

  void add_to_host(float* host_sum, const void* device_grad, kernels::GradType type, std::int64_t numel,
                   bool first) override {
    compute_.accumulate(host_sum, device_grad, type, numel, first);
  }

  void fill_zero(void* device, std::size_t nbytes) override {
    torch_parallel_for()(static_cast<std::int64_t>(nbytes), kCopyGrain, [device](std::int64_t begin, std::int64_t end) {
      std::memset(static_cast<char*>(device) + begin, 0, static_cast<std::size_t>(end - begin));
    });
  }

  [[nodiscard]] Compute& compute() override { return compute_; }
  [[nodiscard]] std::unique_ptr<GradientJudge> make_judge() override { return make_cpu_judge(); }
  [[nodiscard]] EventPtr record(Queue /*queue*/) override { return std::make_shared<PastEvent>(); }
  [[nodiscard]] EventPtr record_time(Queue /*queue*/) override { return std::make_shared<PastEvent>(); }
  [[nodiscard]] double seconds_between(const EventPtr& begin, const EventPtr& end) const override {
    return std::chrono::duration<double>(static_cast<const PastEvent&>(*end).time -
                                         static_cast<const PastEvent&>(*begin).time)
        .count();
  }
  [[nodiscard]] std::uint64_t begin_range(const char* /*what*/, int /*index*/) override { return 0; }
  void end_range(std::uint64_t /*range*/) noexcept override {}
  [[nodiscard]] LinkRates measure_links(double /*most_seconds*/) override { return {}; }
  void wait(Queue /*queue*/, const EventPtr& event) override { event->wait(); }
  void copy(Queue /*queue*/, void* to, const void* from, std::size_t nbytes) override { std::memcpy(to, from, nbytes); }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> /*memory*/,
                                                            std::string& /*reason*/) override {
    return nullptr;
  }
  void attach_thread() override {}
  [[nodiscard]] DeviceMemory memory() const override { return meter_.ledger().memory(); }
  void reset_peak() override { meter_.ledger().reset_peak(); }
  [[nodiscard]] std::size_t take_peak() override { return meter_.ledger().take_peak(); }
  void add_memory_cap(std::size_t nbytes) override { meter_.ledger().add_cap(nbytes); }
  void remove_memory_cap(std::size_t nbytes) noexcept override { meter_.ledger().remove_cap(nbytes); }
  [[nodiscard]] std::optional<std::size_t> free_nbytes() const override { return std::nullopt; }
  [[nodiscard]] std::unique_ptr<Subscription> when_short(std::function<bool()> /*give_back*/) override {
    return nullptr;
  }
  void start_timeline() override { meter_.ledger().start_timeline(kTimelineResolution); }
  [[nodiscard]] std::vector<MemorySample> take_timeline() override { return meter_.ledger().take_timeline(); }

  void reassign(const at::Tensor& tensor, Owner owner) override { meter_.reassign(tensor.storage().data_ptr(), owner); }
  [[nodiscard]] bool counts(const at::Tensor& tensor) const override {
    return meter_.counts(tensor.storage().data_ptr());
  }

 private:
  static void copy(void* to, const void* from, std::size_t nbytes) {
    torch_parallel_for()(static_cast<std::int64_t>(nbytes), kCopyGrain,
                         [to, from](std::int64_t begin, std::int64_t end) {
                           std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                                       static_cast<std::size_t>(end - begin));
                         });
  }

  MemoryMeter& meter_ = MemoryMeter::install();
  CpuCompute compute_;
};

}  // namespace

std::unique_ptr<Device> make_metered_cpu() { return std::make_unique<MeteredCpu>(); }

}  // namespace pannier
