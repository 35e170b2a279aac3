// Points in CUDA streams, from a pool of events.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "pannier/device/cuda/cuda_support.h"
#include "pannier/device/device.h"

namespace pannier {

/// Events to be used again: creating one costs more than recording it. Thread-safe; outlives every event of it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(unsigned flags) : flags_(flags) {}
  ~EventPool() {
    for (cudaEvent_t event : free_) {
      cudaEventDestroy(event);
    }
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, flags_), "create an event");
    return event;
  }
  void give_back(cudaEvent_t event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  unsigned flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(std::shared_ptr<EventPool> pool, cudaStream_t stream) : pool_(std::move(pool)), event_(pool_->take()) {
    check_cuda(cudaEventRecord(event_, stream), "record an event");
  }
  ~CudaEvent() override { pool_->give_back(event_); }
  [[nodiscard]] bool is_done() const override {
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) {
      return false;
    }
    check_cuda(result, "ask an event");
    return true;
  }
  void wait() const override { check_cuda(cudaEventSynchronize(event_), "wait for a transfer"); }
  [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }

 private:
  std::shared_ptr<EventPool> pool_;
  cudaEvent_t event_;
};

}  // namespace pannier
