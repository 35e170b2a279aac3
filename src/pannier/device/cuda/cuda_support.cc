#include "pannier/device/cuda/cuda_support.h"

#include <ATen/ops/empty.h>

namespace pannier {

UploadArea::UploadArea(c10::DeviceIndex device) : device_(device) {
  void* pinned = nullptr;
  check_cuda(cudaHostAlloc(&pinned, 2 * kHalfNbytes, cudaHostAllocPortable), "allocate the upload area");
  pinned_ = static_cast<char*>(pinned);
  for (cudaEvent_t& event : read_) {
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "create an event");
  }
}

UploadArea::~UploadArea() {
  for (cudaEvent_t event : read_) {
    cudaEventSynchronize(event);
    cudaEventDestroy(event);
  }
  cudaFreeHost(pinned_);
}

at::Tensor UploadArea::upload_bytes(const void* data, std::size_t nbytes) {
  const cudaStream_t stream = compute_stream(device_);
  const at::Tensor device =
      at::empty({static_cast<std::int64_t>(nbytes)},
                at::TensorOptions().dtype(at::kByte).device(c10::Device(c10::DeviceType::CUDA, device_)));
  if (nbytes > kHalfNbytes) {
    check_cuda(cudaMemcpyAsync(device.data_ptr(), data, nbytes, cudaMemcpyHostToDevice, stream), "upload descriptors");
    check_cuda(cudaStreamSynchronize(stream), "upload descriptors");
    return device;
  }
  if (used_ + nbytes > kHalfNbytes) {
    check_cuda(cudaEventRecord(read_[half_], stream), "mark the upload area");
    half_ = 1 - half_;
    used_ = 0;
    check_cuda(cudaEventSynchronize(read_[half_]), "wait for the upload area");
  }
  char* const from = pinned_ + static_cast<std::size_t>(half_) * kHalfNbytes + used_;
  std::memcpy(from, data, nbytes);
  used_ += (nbytes + 15) / 16 * 16;
  check_cuda(cudaMemcpyAsync(device.data_ptr(), from, nbytes, cudaMemcpyHostToDevice, stream), "upload descriptors");
  return device;
}

}  // namespace pannier
