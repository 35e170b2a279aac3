// What an engine moves into counted memory without training it: the model's buffers and frozen parameters. Some are
// views of each other (`register_buffer("b", t[:3])`); what shares memory before the move shares it after.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace pannier {

/// Collects tensors, then moves each piece of memory once. One thread at a time.
class UnmanagedTensors {
 public:
  /// Adds a tensor that becomes `dtype`. One whose dtype changes leaves the memory that it shares with others.
  void add(const at::Tensor& tensor, at::ScalarType dtype);

  /// Bytes of all tensors after the move, shared ones once.
  [[nodiscard]] std::size_t nbytes() const;

  /// Moves the data of every tensor into new memory of torch's allocator for `target`; the tensors stay the same
  /// objects. On a GPU, those that are there already and keep their dtype stay where they are: their memory is counted.
  void move(c10::Device target) const;

 private:
  struct Entry {
    at::Tensor tensor;
    at::ScalarType dtype;
  };
  /// A stretch of a storage, in bytes, with the tensors in it.
  struct Stretch {
    const char* begin;
    const char* end;
    std::vector<at::Tensor> tensors;
  };

  [[nodiscard]] std::vector<Stretch> shared_stretches() const;

  std::vector<Entry> alone_;     ///< Converted, or of a kind whose bytes can't be pointed at.
  std::vector<Stretch> placed_;  ///< The stretch that each other tensor spans.
};

}  // namespace pannier
