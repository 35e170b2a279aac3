#include "pannier/device/cuda/allocator_limits.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "pannier/device/cuda/cuda_ledger.h"
#include "pannier/device/cuda/cuda_support.h"

namespace pannier {
namespace {

class Caps {
 public:
  static Caps& instance() {
    static Caps caps;
    return caps;
  }
  void add(c10::DeviceIndex device, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    caps_[device].insert(nbytes);
  }
  void remove(c10::DeviceIndex device, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    auto& caps = caps_[device];
    if (const auto found = caps.find(nbytes); found != caps.end()) {
      caps.erase(found);
    }
  }
  std::size_t least(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return caps_[device].empty() ? 0 : *caps_[device].begin();
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::multiset<std::size_t>> caps_;
};

/// Who gives device memory back when torch's allocator finds none. The allocator calls with its lock held.
class Givers {
 public:
  static Givers& instance() {
    static Givers givers;
    return givers;
  }
  int add(std::function<bool()> give_back) {
    const std::lock_guard lock(mutex_);
    givers_[++last_] = std::move(give_back);
    return last_;
  }
  void remove(int key) {
    const std::lock_guard lock(mutex_);
    givers_.erase(key);
  }
  bool ask() {
    // Whoever subscribes or leaves at this moment may wait for the allocator, so it is not waited for.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    bool freed = false;
    if (lock.owns_lock()) {
      for (const auto& [key, give_back] : givers_) {
        freed = give_back() || freed;
      }
    }
    return freed;
  }

 private:
  std::mutex mutex_;
  int last_ = 0;
  std::map<int, std::function<bool()>> givers_;
};

class Giver final : public Subscription {
 public:
  explicit Giver(std::function<bool()> give_back) : key_(Givers::instance().add(std::move(give_back))) {}
  ~Giver() override { Givers::instance().remove(key_); }

 private:
  int key_;
};

/// torch asks before it takes new memory from the driver, whether or not there is plenty; so ours is given back only
/// where the largest block that was ever asked for would not fit.
class AskGivers final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    const c10::DeviceIndex device = c10::cuda::current_device();
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
      return false;
    }
    free = std::min(free, left_of_fraction(device, total));
    return free < CudaLedger::of(device).largest_nbytes() && Givers::instance().ask();
  }
};

}  // namespace

namespace device_caps {

void add(c10::DeviceIndex device, std::size_t nbytes) { Caps::instance().add(device, nbytes); }
void remove(c10::DeviceIndex device, std::size_t nbytes) noexcept { Caps::instance().remove(device, nbytes); }
std::size_t least(c10::DeviceIndex device) { return Caps::instance().least(device); }

}  // namespace device_caps

std::size_t left_of_fraction(c10::DeviceIndex device, std::size_t total) {
  const auto allowed = static_cast<std::size_t>(c10::cuda::CUDACachingAllocator::get()->getMemoryFraction(device) *
                                                static_cast<double>(total));
  const auto reserved =
      static_cast<std::size_t>(c10::cuda::CUDACachingAllocator::getDeviceStats(device).reserved_bytes[0].current);
  return allowed - std::min(allowed, reserved);
}

void let_segments_grow() {
  if (std::getenv("PYTORCH_CUDA_ALLOC_CONF") == nullptr && std::getenv("PYTORCH_ALLOC_CONF") == nullptr) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  }
}

std::unique_ptr<Subscription> when_allocator_is_short(std::function<bool()> give_back) {
  return std::make_unique<Giver>(std::move(give_back));
}

}  // namespace pannier

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("pannier", ::pannier::AskGivers)
}
