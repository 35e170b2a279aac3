// Writes stamps into messages and checks those that came.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pannier/comm/label.h"

namespace pannier {

/// A message that came, and the stamp that it should end in.
struct StampedMessage {
  at::Tensor message;
  Stamp expected;
};

/// Stamps in device memory, on the current stream and without waiting for it. One thread.
class StampChecker {
 public:
  StampChecker() = default;
  virtual ~StampChecker() = default;
  StampChecker(const StampChecker&) = delete;
  StampChecker& operator=(const StampChecker&) = delete;

  virtual void write(const at::Tensor& message, const Stamp& stamp) = 0;
  /// A bool tensor of one element on the messages' device: true where a stamp differs. `messages` is not empty, and all
  /// belong to one operation.
  [[nodiscard]] virtual at::Tensor check(const std::vector<StampedMessage>& messages) = 0;
};

/// Made of torch's own operations: a handful of small kernels, however many ranks there are.
[[nodiscard]] std::unique_ptr<StampChecker> make_torch_stamp_checker();

/// In host memory.
void write_stamp(const at::Tensor& message, const Stamp& stamp);
[[nodiscard]] Stamp read_stamp(const at::Tensor& message);

}  // namespace pannier
