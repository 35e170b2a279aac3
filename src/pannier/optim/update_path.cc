#include "pannier/optim/update_path.h"

#include <cstring>
#include <utility>
#include <vector>

#include "pannier/base/units.h"

namespace pannier {
namespace {

class DevicePath final : public UpdatePath {
 public:
  explicit DevicePath(Device& device) : device_(device) {}
  [[nodiscard]] Compute& compute() override { return device_.compute(); }
  // The update writes the very memory that the model reads.
  [[nodiscard]] CopyRun way_to_model(int /*bucket*/, const StateView& /*view*/) const override { return {}; }
  TransferPtr publish(const CopyRun& /*way*/) override { return nullptr; }
  void finish() override {}
  void fetch(int /*bucket*/, const StateView& /*view*/, const ElementRange& /*elements*/) override {}
  void read_state(void* device_to, const void* state_from, std::size_t nbytes) override {
    device_.copy_on_device(device_to, state_from, nbytes);
  }
  void write_state(void* state_to, const void* device_from, std::size_t nbytes) override {
    device_.copy_on_device(state_to, device_from, nbytes);
  }
  void state_to_host(void* host_to, const void* state_from, std::size_t nbytes) override {
    device_.copy_to_host(host_to, state_from, nbytes);
  }
  void state_from_host(void* state_to, const void* host_from, std::size_t nbytes) override {
    device_.copy_to_device(state_to, host_from, nbytes);
  }
  void zero_state(void* state, std::size_t nbytes) override { device_.fill_zero(state, nbytes); }

 private:
  Device& device_;
};

class HostPath final : public UpdatePath {
 public:
  HostPath(Device& device, std::function<at::Tensor(int)> shard, Mover& up, std::function<bool(int)> rests_here,
           std::function<bool(int)> is_whole, int most_threads)
      : device_(device),
        shard_(std::move(shard)),
        up_(up),
        rests_here_(std::move(rests_here)),
        is_whole_(std::move(is_whole)),
        most_threads_(most_threads),
        compute_(most_threads) {}
  [[nodiscard]] Compute& compute() override { return compute_; }
  [[nodiscard]] int most_threads() const override { return most_threads_; }

  [[nodiscard]] CopyRun way_to_model(int bucket, const StateView& view) const override {
    if (rests_here_(bucket)) {
      return {};
    }
    const at::Tensor flat = shard_(bucket);
    const auto width = static_cast<std::size_t>(flat.element_size());
    return {static_cast<char*>(flat.data_ptr()) + nbytes_of(view.range.begin, width), view.param,
            nbytes_of(view.range.numel(), width)};
  }
  TransferPtr publish(const CopyRun& way) override {
    if (way.nbytes == 0) {
      return nullptr;
    }
    // Work that the caller has queued may still read the old parameter.
    published_.push_back(up_.push({way}, {device_.record(Queue::kCompute)}, nullptr, "parameters"));
    return published_.back();
  }
  void finish() override {
    for (const TransferPtr& transfer : std::exchange(published_, {})) {
      device_.wait(Queue::kCompute, transfer->wait_issued());
    }
  }
  void fetch(int bucket, const StateView& view, const ElementRange& elements) override {
    if (rests_here_(bucket) && !is_whole_(bucket)) {
      return;
    }
    const at::Tensor flat = shard_(bucket);
    const auto width = static_cast<std::size_t>(flat.element_size());
    device_.copy_to_host(static_cast<char*>(view.param) + nbytes_of(elements.begin - view.range.begin, width),
                         static_cast<const char*>(flat.data_ptr()) + nbytes_of(elements.begin, width),
                         nbytes_of(elements.numel(), width));
  }
  void read_state(void* device_to, const void* state_from, std::size_t nbytes) override {
    device_.copy_to_device(device_to, state_from, nbytes);
  }
  void write_state(void* state_to, const void* device_from, std::size_t nbytes) override {
    device_.copy_to_host(state_to, device_from, nbytes);
  }
  void state_to_host(void* host_to, const void* state_from, std::size_t nbytes) override {
    std::memcpy(host_to, state_from, nbytes);
  }
  void state_from_host(void* state_to, const void* host_from, std::size_t nbytes) override {
    std::memcpy(state_to, host_from, nbytes);
  }
  void zero_state(void* state, std::size_t nbytes) override { std::memset(state, 0, nbytes); }

 private:
  Device& device_;
  std::function<at::Tensor(int)> shard_;
  Mover& up_;
  std::function<bool(int)> rests_here_;
  std::function<bool(int)> is_whole_;
  std::vector<TransferPtr> published_;
  int most_threads_;
  CpuCompute compute_;
};

}  // namespace

void BucketUpdate::place(const StateView& view) {
  const auto at = [](void* base, std::int64_t offset, std::size_t width) -> void* {
    return base == nullptr ? nullptr : static_cast<char*>(base) + nbytes_of(offset, width);
  };
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const std::int64_t offset = later->offsets.at(i);
    auto& buffers = tasks[i].buffers;
    buffers.param = at(view.param, offset, later->shape.param_nbytes);
    buffers.rest = at(view.rest, offset, later->shape.rest_nbytes);
    buffers.state1 = static_cast<float*>(at(view.state1, offset, sizeof(float)));
    buffers.state2 = static_cast<float*>(at(view.state2, offset, sizeof(float)));
  }
  parameter.from = view.param;
}

std::int64_t BucketUpdate::numel() const {
  std::int64_t sum = 0;
  for (const kernels::UpdateTask& task : tasks) {
    sum += task.buffers.numel;
  }
  return sum;
}

std::unique_ptr<UpdatePath> make_device_path(Device& device) { return std::make_unique<DevicePath>(device); }
std::unique_ptr<UpdatePath> make_host_path(Device& device, std::function<at::Tensor(int)> shard, Mover& up,
                                           std::function<bool(int)> rests_in_host_memory,
                                           std::function<bool(int)> is_whole, int most_threads) {
  return std::make_unique<HostPath>(device, std::move(shard), up, std::move(rests_in_host_memory), std::move(is_whole),
                                    most_threads);
}

}  // namespace pannier
