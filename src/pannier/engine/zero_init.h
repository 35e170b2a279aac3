// Building a model that no rank can hold whole: each part is partitioned as soon as it is made.
//
//   pannier::ZeroInit init(std::move(communicator));
//   struct ModelImpl : torch::nn::Module {
//     ModelImpl(pannier::ZeroInit& init) : block(register_module("block", init.partition(Block(8192)))) {}
//   ...
//   auto engine = pannier::initialize(model, config, {.units = {...}, .init = std::move(init)});
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "pannier/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace pannier {

/// Leaves each rank its share of a part's parameters, of rank 0's values, until initialize() takes the model. Until
/// then a partitioned parameter keeps its shape, and whoever reads it gets a c10::Error that says so. With one rank
/// nothing is different. All ranks build the same parts in the same order. Move-only.
class ZeroInit {
 public:
  /// `communicator`: the ranks that will train together; null: this process alone.
  explicit ZeroInit(std::unique_ptr<Communicator> communicator);
  ~ZeroInit();
  ZeroInit(ZeroInit&&) noexcept;
  ZeroInit& operator=(ZeroInit&&) noexcept;
  ZeroInit(const ZeroInit&) = delete;
  ZeroInit& operator=(const ZeroInit&) = delete;

  /// Partitions all parameters of `part` that are whole. A parameter that has gaps or overlaps in memory stays whole,
  /// as has an empty one. Throws CollectiveError.
  void partition(torch::nn::Module& part);
  /// The same for a module holder, which comes back: for use inside register_module().
  template <class Holder>
    requires requires(const Holder& holder) { holder.ptr(); }
  Holder partition(Holder part) {
    partition(*part.ptr());
    return part;
  }

  /// This rank's share of each of `parameters`: flat, in the order of its memory, of one size on all ranks, the last
  /// ones padded; an empty tensor for one that is whole.
  [[nodiscard]] std::vector<at::Tensor> shares_of(const std::vector<at::Tensor>& parameters) const;
  [[nodiscard]] int world_size() const noexcept { return communicator_ == nullptr ? 1 : communicator_->world_size(); }
  /// The ranks; ends this object's use of them.
  [[nodiscard]] std::unique_ptr<Communicator> take_communicator() noexcept { return std::move(communicator_); }

 private:
  void partition_one(const at::Tensor& parameter);

  std::unique_ptr<Communicator> communicator_;
  /// By parameter, which it keeps: an address never comes to mean another parameter.
  std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> shares_;
};

}  // namespace pannier
