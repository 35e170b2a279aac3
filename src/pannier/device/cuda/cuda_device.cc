// A GPU as a Device: torch's caching allocator, the caller's stream to compute on, and two streams of our own for
// transfers.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>

#include <nvtx3/nvToolsExt.h>
#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/device/cuda/allocator_limits.h"
#include "pannier/device/cuda/cuda_compute.h"
#include "pannier/device/cuda/cuda_event.h"
#include "pannier/device/cuda/cuda_judge.h"
#include "pannier/device/cuda/cuda_ledger.h"
#include "pannier/device/cuda/cuda_support.h"
#include "pannier/device/cuda/host_registration.h"
#include "pannier/device/cuda/link_probe.h"
#include "pannier/device/device.h"

namespace pannier {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr std::size_t kTimelineResolution = std::size_t{16} << 20;
constexpr std::size_t kStagingNbytes = std::size_t{16} << 20;
/// Of a profiler's range; longer ones are cut.
constexpr std::size_t kRangeNameNbytes = 64;

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(c10::DeviceIndex index)
      : index_(index),
        guard_(index),
        events_(std::make_shared<EventPool>(cudaEventDisableTiming | cudaEventBlockingSync)),
        times_(std::make_shared<EventPool>(cudaEventBlockingSync)),
        ledger_(CudaLedger::of(index)),
        compute_(index) {
    for (cudaStream_t* stream : {&up_, &down_}) {
      check_cuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "create a stream");
    }
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, index), "ask the GPU's name");
    name_ = properties.name;
    let_segments_grow();
    guard_.reset();
  }
  ~CudaDevice() override {
    for (cudaStream_t stream : {up_, down_}) {
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
    if (staging_ != nullptr) {
      cudaFreeHost(staging_);
    }
  }

  [[nodiscard]] c10::Device torch_device() const override { return {c10::DeviceType::CUDA, index_}; }
  [[nodiscard]] std::string name() const override { return name_; }

  [[nodiscard]] at::Tensor allocate(std::int64_t numel, at::ScalarType dtype, Owner owner) override {
    const OwnerScope scope(owner);
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(torch_device()));
  }

  void copy_to_host(void* host, const void* device, std::size_t nbytes) override {
    copy_and_wait(host, device, nbytes);
  }
  void copy_to_device(void* device, const void* host, std::size_t nbytes) override {
    copy_and_wait(device, host, nbytes);
  }
  void copy_on_device(void* to, const void* from, std::size_t nbytes) override {
    const c10::cuda::CUDAGuard guard(index_);
    check_cuda(cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, compute_stream(index_)), "copy");
  }
  void fill_zero(void* device, std::size_t nbytes) override {
    const c10::cuda::CUDAGuard guard(index_);
    check_cuda(cudaMemsetAsync(device, 0, nbytes, compute_stream(index_)), "fill with zeros");
  }

  void add_to_host(float* host_sum, const void* device_grad, kernels::GradType type, std::int64_t numel,
                   bool first) override {
    const c10::cuda::CUDAGuard guard(index_);
    if (staging_ == nullptr) {
      check_cuda(cudaHostAlloc(&staging_, kStagingNbytes, cudaHostAllocPortable), "allocate staging memory");
    }
    const std::size_t width = type == kernels::GradType::kFp32 ? 4 : 2;
    const auto piece_numel = static_cast<std::int64_t>(kStagingNbytes / width);
    for (std::int64_t at = 0; at < numel; at += piece_numel) {
      const std::int64_t count = std::min(piece_numel, numel - at);
      copy_and_wait(staging_, static_cast<const char*>(device_grad) + nbytes_of(at, width), nbytes_of(count, width));
      host_compute_.accumulate(host_sum + at, staging_, type, count, first);
    }
  }

  [[nodiscard]] Compute& compute() override { return compute_; }
  [[nodiscard]] std::unique_ptr<GradientJudge> make_judge() override { return make_cuda_judge(index_); }

  [[nodiscard]] EventPtr record(Queue queue) override {
    const c10::cuda::CUDAGuard guard(index_);
    return std::make_shared<CudaEvent>(events_, stream_of(queue));
  }
  [[nodiscard]] EventPtr record_time(Queue queue) override {
    const c10::cuda::CUDAGuard guard(index_);
    return std::make_shared<CudaEvent>(times_, stream_of(queue));
  }
  [[nodiscard]] std::uint64_t begin_range(const char* what, int index) override {
    std::array<char, kRangeNameNbytes> name{};
    std::snprintf(name.data(), name.size(), index < 0 ? "%s" : "%s %d", what, index);
    return nvtxRangeStartA(name.data());
  }
  void end_range(std::uint64_t range) noexcept override { nvtxRangeEnd(range); }
  [[nodiscard]] double seconds_between(const EventPtr& begin, const EventPtr& end) const override {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(*begin).get(),
                                    static_cast<const CudaEvent&>(*end).get()),
               "measure a time");
    return static_cast<double>(milliseconds) / 1e3;
  }
  [[nodiscard]] LinkRates measure_links(double most_seconds) override {
    const c10::cuda::CUDAGuard guard(index_);
    return measure_cuda_links(up_, down_, most_seconds);
  }
  void wait(Queue queue, const EventPtr& event) override {
    const c10::cuda::CUDAGuard guard(index_);
    check_cuda(cudaStreamWaitEvent(stream_of(queue), static_cast<const CudaEvent&>(*event).get(), 0), "order streams");
  }
  void copy(Queue queue, void* to, const void* from, std::size_t nbytes) override {
    const c10::cuda::CUDAGuard guard(index_);
    while (nbytes > 0) {
      const std::size_t step = std::min(chunks_.reach(to, nbytes), chunks_.reach(from, nbytes));
      check_cuda(cudaMemcpyAsync(to, from, step, cudaMemcpyDefault, stream_of(queue)), "transfer");
      to = static_cast<char*>(to) + step;
      from = static_cast<const char*>(from) + step;
      nbytes -= step;
    }
  }
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory, std::string& reason) override {
    const c10::cuda::CUDAGuard guard(index_);
    return register_with_cuda(memory, chunks_, reason);
  }
  void attach_thread() override { check_cuda(cudaSetDevice(index_), "choose the GPU"); }

  [[nodiscard]] DeviceMemory memory() const override {
    DeviceMemory memory = ledger_.ledger().memory();
    memory.cap = device_caps::least(index_);
    return memory;
  }
  void reset_peak() override { ledger_.ledger().reset_peak(); }
  [[nodiscard]] std::size_t take_peak() override { return ledger_.ledger().take_peak(); }
  void add_memory_cap(std::size_t nbytes) override {
    if (const std::size_t current = ledger_.ledger().memory().current; current > nbytes) {
      throw ConfigError(
          fmt::format("a device memory cap of {} is below the {} in use", format_bytes(nbytes), format_bytes(current)));
    }
    device_caps::add(index_, nbytes);
  }
  void remove_memory_cap(std::size_t nbytes) noexcept override { device_caps::remove(index_, nbytes); }
  [[nodiscard]] std::optional<std::size_t> free_nbytes() const override {
    const c10::cuda::CUDAGuard guard(index_);
    std::size_t free = 0;
    std::size_t total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "ask for free memory");
    const auto stats = allocator::getDeviceStats(index_);
    const auto cached = stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
    return std::min(free, left_of_fraction(index_, total)) +
           static_cast<std::size_t>(std::max<std::int64_t>(cached, 0));
  }
  [[nodiscard]] std::unique_ptr<Subscription> when_short(std::function<bool()> give_back) override {
    return when_allocator_is_short(std::move(give_back));
  }
  void start_timeline() override { ledger_.ledger().start_timeline(kTimelineResolution); }
  [[nodiscard]] std::vector<MemorySample> take_timeline() override { return ledger_.ledger().take_timeline(); }
  void reassign(const at::Tensor& tensor, Owner owner) override { ledger_.reassign(tensor.storage().data(), owner); }
  [[nodiscard]] bool counts(const at::Tensor& tensor) const override { return tensor.is_cuda(); }

 private:
  [[nodiscard]] cudaStream_t stream_of(Queue queue) const {
    return queue == Queue::kUp ? up_ : queue == Queue::kDown ? down_ : compute_stream(index_);
  }
  void copy_and_wait(void* to, const void* from, std::size_t nbytes) {
    copy(Queue::kCompute, to, from, nbytes);
    const c10::cuda::CUDAGuard guard(index_);
    check_cuda(cudaStreamSynchronize(compute_stream(index_)), "copy between host and device");
  }

  c10::DeviceIndex index_;
  c10::cuda::OptionalCUDAGuard guard_;  ///< For construction only.
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<EventPool> times_;
  CudaLedger& ledger_;
  CudaCompute compute_;
  CpuCompute host_compute_;
  RegisteredChunks chunks_;
  cudaStream_t up_ = nullptr;
  cudaStream_t down_ = nullptr;
  void* staging_ = nullptr;
  std::string name_;
};

}  // namespace
}  // namespace pannier

/// The one symbol that libpannier.so asks this library for.
extern "C" pannier::Device* pannier_make_cuda_device(int index);
extern "C" pannier::Device* pannier_make_cuda_device(int index) {
  return std::make_unique<pannier::CudaDevice>(static_cast<c10::DeviceIndex>(index)).release();
}
