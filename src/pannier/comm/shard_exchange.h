// What ranks tell each other about a flat bucket: in backward each sends every other the gradients of the shard that
// the other owns; after the update each sends all others its shard of the parameters. Both are one exchange of runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pannier/comm/communicator.h"
#include "pannier/layout/shard_layout.h"

namespace pannier {

/// Exchanges shards. Every rank makes the same calls in the same order. What it refers to must outlive it.
class ShardExchange {
 public:
  ShardExchange(const ShardLayout& shards, Communicator& communicator) : shards_(shards), communicator_(communicator) {}

  /// The step that errors name.
  void set_step(std::int64_t step) noexcept { step_ = static_cast<std::uint32_t>(step); }

  /// What each rank has of this rank's shard.
  struct Scattered {
    std::vector<at::Tensor> parts;  ///< By rank, this one's own too; elements of the shard. Read after wait().
    std::unique_ptr<PendingExchange> pending;
  };
  /// Sends each rank its shard of `flat`, a bucket's gradients as the bucket is laid out, and takes this rank's from
  /// all.
  [[nodiscard]] Scattered scatter(const at::Tensor& flat, int bucket);

  /// Sends this rank's shard of `flat`, a bucket laid out, to all others and takes theirs, each into its place.
  [[nodiscard]] std::unique_ptr<PendingExchange> gather(const at::Tensor& flat, int bucket);

  /// gather() in two halves, where ranks form nodes: ranks that keep the same part tell each other their shards of it,
  /// and then the ranks of a node their parts.
  [[nodiscard]] std::unique_ptr<PendingExchange> gather_between_nodes(const at::Tensor& flat, int bucket);
  [[nodiscard]] std::unique_ptr<PendingExchange> gather_in_node(const at::Tensor& flat, int bucket);

  /// The same for the elements of one parameter, of which each rank has its piece. `what` tells apart what ranks might
  /// ask for at the same time: a state by its number, or kGradient. Waits.
  void gather_parameter(const at::Tensor& flat, int parameter, int what);
  static constexpr int kGradient = 15;

 private:
  template <class Send, class Receive>
  [[nodiscard]] std::unique_ptr<PendingExchange> start(const Label& label, at::Device device, const Send& send,
                                                       const Receive& receive);

  const ShardLayout& shards_;
  Communicator& communicator_;
  std::uint32_t step_ = 0;
};

}  // namespace pannier
