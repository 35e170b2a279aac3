#include "pannier/device/cuda/host_registration.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace pannier {
namespace {

constexpr std::size_t kMostThreads = 8;

std::span<std::byte> chunk_of(std::span<std::byte> memory, std::size_t index) {
  const std::size_t begin = index * RegisteredChunks::kChunkNbytes;
  return memory.subspan(begin, std::min(RegisteredChunks::kChunkNbytes, memory.size() - begin));
}

std::size_t num_chunks(std::span<std::byte> memory) {
  return (memory.size() + RegisteredChunks::kChunkNbytes - 1) / RegisteredChunks::kChunkNbytes;
}

// Calls `work` for every chunk on a few threads.
template <class Work>
void for_each_chunk(std::span<std::byte> memory, const Work& work) {
  std::atomic<std::size_t> next = 0;
  const std::size_t count = num_chunks(memory);
  int device = 0;
  cudaGetDevice(&device);
  const auto loop = [&] {
    cudaSetDevice(device);
    for (std::size_t i = next++; i < count; i = next++) {
      work(i);
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t i = 1; i < std::min(count, kMostThreads); ++i) {
    threads.emplace_back(loop);
  }
  loop();
}

class CudaRegistration final : public Registration {
 public:
  CudaRegistration(std::span<std::byte> memory, RegisteredChunks& chunks) : memory_(memory), chunks_(chunks) {
    chunks_.add(memory_);
  }
  ~CudaRegistration() override {
    chunks_.remove(memory_);
    for_each_chunk(memory_, [this](std::size_t i) { cudaHostUnregister(chunk_of(memory_, i).data()); });
  }

 private:
  std::span<std::byte> memory_;
  RegisteredChunks& chunks_;
};

}  // namespace

void RegisteredChunks::add(std::span<std::byte> memory) {
  const std::lock_guard lock(mutex_);
  areas_.push_back(memory);
}

void RegisteredChunks::remove(std::span<std::byte> memory) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(areas_, [&](const auto& area) { return area.data() == memory.data(); });
}

std::size_t RegisteredChunks::reach(const void* address, std::size_t nbytes) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex_);
  for (const auto& area : areas_) {
    if (byte >= area.data() && byte < area.data() + area.size()) {
      return std::min(nbytes, kChunkNbytes - static_cast<std::size_t>(byte - area.data()) % kChunkNbytes);
    }
  }
  return nbytes;
}

std::unique_ptr<Registration> register_with_cuda(std::span<std::byte> memory, RegisteredChunks& chunks,
                                                 std::string& reason) {
  if (memory.empty()) {
    return nullptr;
  }
  std::atomic<cudaError_t> error = cudaSuccess;
  std::vector<char> registered(num_chunks(memory), 0);
  for_each_chunk(memory, [&](std::size_t i) {
    const auto chunk = chunk_of(memory, i);
    if (error.load() != cudaSuccess) {
      return;
    }
    const cudaError_t result = cudaHostRegister(chunk.data(), chunk.size(), cudaHostRegisterPortable);
    registered[i] = result == cudaSuccess ? 1 : 0;
    if (result != cudaSuccess) {
      cudaGetLastError();
      error = result;
    }
  });
  if (error.load() == cudaSuccess) {
    return std::make_unique<CudaRegistration>(memory, chunks);
  }
  for (std::size_t i = 0; i < registered.size(); ++i) {
    if (registered[i] != 0) {
      cudaHostUnregister(chunk_of(memory, i).data());
    }
  }
  reason = cudaGetErrorString(error.load());
  return nullptr;
}

}  // namespace pannier
