// What the CUDA device's parts share: errors, the caller's stream, and descriptors on their way to the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <span>

#include "pannier/kernels/cuda/cuda_error.h"
#include "pannier/kernels/cuda/stream.h"

namespace pannier {

using kernels::cuda::check_cuda;

/// The stream that the calling thread's work goes to.
[[nodiscard]] inline cudaStream_t compute_stream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

/// Pinned host memory through which small arrays travel to the device without making the host wait. Used in turns: a
/// half is written again only when the device has read it. One thread at a time.
class UploadArea {
 public:
  explicit UploadArea(c10::DeviceIndex device);
  ~UploadArea();
  UploadArea(const UploadArea&) = delete;
  UploadArea& operator=(const UploadArea&) = delete;

  /// A device copy of `items`, in the order of the caller's stream; lives as long as the tensor does.
  template <class T>
  [[nodiscard]] at::Tensor upload(std::span<const T> items) {
    return upload_bytes(items.data(), items.size_bytes());
  }

 private:
  [[nodiscard]] at::Tensor upload_bytes(const void* data, std::size_t nbytes);

  static constexpr std::size_t kHalfNbytes = std::size_t{1} << 20;
  c10::DeviceIndex device_;
  char* pinned_ = nullptr;
  cudaEvent_t read_[2] = {};
  int half_ = 0;
  std::size_t used_ = 0;
};

}  // namespace pannier
