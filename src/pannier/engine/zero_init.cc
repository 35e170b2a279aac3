#include "pannier/engine/zero_init.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/tier/refusing_storage.h"

namespace pannier {
namespace {

constexpr const char* kMessage =
    "a parameter was read that pannier::ZeroInit has partitioned: it is whole again where the engine makes it so, "
    "after "
    "initialize() has taken the model";

}  // namespace

ZeroInit::ZeroInit(std::unique_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}
ZeroInit::~ZeroInit() = default;
ZeroInit::ZeroInit(ZeroInit&&) noexcept = default;
ZeroInit& ZeroInit::operator=(ZeroInit&&) noexcept = default;

void ZeroInit::partition(torch::nn::Module& part) {
  if (world_size() == 1) {
    return;
  }
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& parameter : part.parameters()) {
    if (!shares_.contains(parameter.unsafeGetTensorImpl()) && parameter.numel() > 0 &&
        parameter.is_non_overlapping_and_dense()) {
      partition_one(parameter);
    }
  }
}

void ZeroInit::partition_one(const at::Tensor& parameter) {
  const std::int64_t numel = parameter.numel();
  const std::int64_t share_numel = (numel + world_size() - 1) / world_size();
  const at::Tensor flat = parameter.detach().as_strided({numel}, {1}).clone();
  communicator_->broadcast(flat, 0);
  const std::int64_t begin = std::min(numel, communicator_->rank() * share_numel);
  const std::int64_t end = std::min(numel, begin + share_numel);
  const at::Tensor share = at::zeros({share_numel}, flat.options());
  share.narrow(0, 0, end - begin).copy_(flat.narrow(0, begin, end - begin));
  take_memory(parameter, kMessage);
  shares_.emplace(parameter.unsafeGetTensorImpl(), std::pair(parameter, share));
}

std::vector<at::Tensor> ZeroInit::shares_of(const std::vector<at::Tensor>& parameters) const {
  std::vector<at::Tensor> shares;
  for (const at::Tensor& parameter : parameters) {
    const auto found = shares_.find(parameter.unsafeGetTensorImpl());
    shares.push_back(found == shares_.end() ? at::Tensor() : found->second.second);
  }
  return shares;
}

}  // namespace pannier
