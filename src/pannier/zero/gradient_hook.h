// The engine's ear in autograd: a post hook on a parameter's AccumulateGrad node, which runs after the gradient has
// been put into `.grad` and after the user's own hooks, without the interpreter lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "pannier/base/error.h"

namespace torch::autograd {
struct Node;
}

namespace pannier {

/// A backward of the user's own on a loss that had to be scaled first. A RuntimeError in Python, where no call of ours
/// is between, because that is what DeepSpeed raises.
class UnscaledLossError : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

/// Called with the parameter's index, on autograd's thread. Its ConfigError is a ValueError in Python.
using GradientListener = std::function<void(int parameter)>;

/// One installed hook; removed on destruction. Keeps the AccumulateGrad node alive, without which the hook would
/// vanish.
class GradientHook {
 public:
  /// `parameter` must be a leaf that requires a gradient; `listener` is called while it is not expired.
  GradientHook(const at::Tensor& parameter, int index, const std::shared_ptr<GradientListener>& listener);
  ~GradientHook();
  GradientHook(GradientHook&& other) noexcept;
  GradientHook& operator=(GradientHook&& other) noexcept;
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  /// Whether the parameter still uses the node that this hook sits on. A replaced or converted parameter does not.
  [[nodiscard]] bool is_on(const at::Tensor& parameter) const;

  /// Whether any engine listens to this parameter.
  [[nodiscard]] static bool is_hooked(const at::Tensor& parameter);

 private:
  void remove() noexcept;

  std::shared_ptr<torch::autograd::Node> node_;
  std::uintptr_t key_ = 0;
};

}  // namespace pannier
