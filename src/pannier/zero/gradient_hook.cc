#include "pannier/zero/gradient_hook.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace pannier {
namespace {

class PostHook final : public torch::autograd::FunctionPostHook {
 public:
  PostHook(int index, std::weak_ptr<GradientListener> listener) : index_(index), listener_(std::move(listener)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& /*inputs*/) override {
    if (const auto listener = listener_.lock()) {
      try {
        (*listener)(index_);
      } catch (const UnscaledLossError& error) {
        C10_THROW_ERROR(Error, error.what());
      } catch (const ConfigError& error) {
        // Autograd carries torch's own exceptions to Python with their type.
        C10_THROW_ERROR(ValueError, error.what());
      }
    }
    return outputs;
  }

  [[nodiscard]] bool is_listened_to() const { return !listener_.expired(); }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    C10_THROW_ERROR(NotImplementedError, "Pannier does not support compiled autograd; run backward without it");
  }

 private:
  int index_;
  std::weak_ptr<GradientListener> listener_;
};

}  // namespace

GradientHook::GradientHook(const at::Tensor& parameter, int index, const std::shared_ptr<GradientListener>& listener)
    : node_(torch::autograd::impl::grad_accumulator(parameter)) {
  PANNIER_CHECK(node_ != nullptr, "a parameter that is no leaf or requires no gradient was hooked");
  key_ = node_->add_post_hook(std::make_unique<PostHook>(index, listener));
}

GradientHook::GradientHook(GradientHook&& other) noexcept
    : node_(std::exchange(other.node_, nullptr)), key_(std::exchange(other.key_, 0)) {}

GradientHook& GradientHook::operator=(GradientHook&& other) noexcept {
  remove();
  node_ = std::exchange(other.node_, nullptr);
  key_ = std::exchange(other.key_, 0);
  return *this;
}

GradientHook::~GradientHook() { remove(); }

void GradientHook::remove() noexcept {
  if (node_ != nullptr) {
    node_->del_post_hook(key_);
  }
}

bool GradientHook::is_on(const at::Tensor& parameter) const {
  return parameter.requires_grad() && torch::autograd::impl::try_get_grad_accumulator(parameter) == node_;
}

bool GradientHook::is_hooked(const at::Tensor& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (node == nullptr) {
    return false;
  }
  const auto& hooks = node->post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    const auto* ours = dynamic_cast<const PostHook*>(hook.get());
    return ours != nullptr && ours->is_listened_to();
  });
}

}  // namespace pannier
