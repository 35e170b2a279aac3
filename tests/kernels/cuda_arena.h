// What the CUDA kernel tests share: one stretch of memory, on the host and on the device, in which buffers lie between
// bytes that nobody may touch. A test applies reference.h to the host's bytes and a kernel to the device's, then
// compares all of them, so that a write outside a buffer shows as well.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace pannier::testing {

inline void require_cuda(cudaError_t result) {
  if (result != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(result));
  }
}

/// Why no GPU can be used, or empty.
inline std::string why_no_gpu() {
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    return cudaGetErrorString(result);
  }
  return count > 0 ? "" : "this machine has none";
}

/// A test that is run where there is a GPU, and says so where there is none.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = why_no_gpu(); !reason.empty()) {
      GTEST_SKIP() << "not run: no GPU can be used here: " << reason;
    }
  }
};

/// Owns device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    require_cuda(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { write(from); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  void write(const std::vector<T>& from) {
    require_cuda(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> to(count_);
    require_cuda(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

/// Bytes on the host, built up buffer by buffer.
class Arena {
 public:
  explicit Arena(std::uint32_t seed) : random_(seed) {}

  /// Appends a copy of `nbytes` bytes `misalignment` bytes after a multiple of 256, and returns where it begins.
  std::size_t append(const void* from, std::size_t nbytes, std::size_t misalignment) {
    const std::size_t begin = (bytes_.size() + 64 + 255) / 256 * 256 + misalignment;
    while (bytes_.size() < begin) {
      bytes_.push_back(static_cast<unsigned char>(random_()));
    }
    bytes_.resize(begin + nbytes);
    if (nbytes > 0) {
      std::memcpy(bytes_.data() + begin, from, nbytes);
    }
    return begin;
  }
  /// Ends the last buffer with bytes that nobody may touch.
  void close() { append(nullptr, 0, 0); }

  [[nodiscard]] std::vector<unsigned char>& bytes() { return bytes_; }

 private:
  std::mt19937 random_;
  std::vector<unsigned char> bytes_;
};

/// Sizes below and above those of packs, pieces and blocks, and one of many blocks.
inline std::vector<std::int64_t> cuda_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t numel = 0; numel <= 70; ++numel) {
    sizes.push_back(numel);
  }
  sizes.insert(sizes.end(), {1023, 1024, 1025, 4095, 4096, 4097, 40001, 40003, 5, 0, 8192});
  return sizes;
}

}  // namespace pannier::testing
