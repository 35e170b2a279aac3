#include "pannier/comm/shard_exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace pannier {
namespace {

// The bytes of a run of elements, as one message.
at::Tensor bytes_of(const at::Tensor& flat, std::int64_t begin, std::int64_t numel) {
  return flat.narrow(0, begin, numel).view(at::kByte);
}

}  // namespace

// Calls `send` and `receive` for each other rank's message; a rank's own piece stays where it is.
template <class Send, class Receive>
std::unique_ptr<PendingExchange> ShardExchange::start(const Label& label, at::Device device, const Send& send,
                                                      const Receive& receive) {
  ExchangeBuffers buffers{.device = device, .stamps = StampPlace::kApart};
  for (int r = 0; r < shards_.world_size(); ++r) {
    const bool is_own = r == shards_.rank();
    buffers.send.push_back(is_own ? at::Tensor() : send(r));
    buffers.receive.push_back(is_own ? at::Tensor() : receive(r));
  }
  return communicator_.exchange(label, std::move(buffers));
}

ShardExchange::Scattered ShardExchange::scatter(const at::Tensor& flat, int bucket) {
  Scattered scattered;
  const Shard& mine = shards_.shard(bucket);
  for (int r = 0; r < shards_.world_size(); ++r) {
    scattered.parts.push_back(r == shards_.rank() ? flat.narrow(0, mine.begin, mine.numel())
                                                  : at::empty({mine.numel()}, flat.options()));
  }
  scattered.pending = start(
      {OperationKind::kGradients, step_, bucket}, flat.device(),
      [&](int r) { return bytes_of(flat, shards_.shard(bucket, r).begin, shards_.shard(bucket, r).numel()); },
      [&](int r) { return bytes_of(scattered.parts[static_cast<std::size_t>(r)], 0, mine.numel()); });
  return scattered;
}

std::unique_ptr<PendingExchange> ShardExchange::gather(const at::Tensor& flat, int bucket) {
  const auto shard_of_rank = [&](int r) {
    return bytes_of(flat, shards_.shard(bucket, r).begin, shards_.shard(bucket, r).numel());
  };
  return start(
      {OperationKind::kParameters, step_, bucket}, flat.device(),
      [&](int /*r*/) { return shard_of_rank(shards_.rank()); }, shard_of_rank);
}

std::unique_ptr<PendingExchange> ShardExchange::gather_between_nodes(const at::Tensor& flat, int bucket) {
  const auto shard_for = [&](int owner, int partner) {
    const Shard& shard = shards_.shard(bucket, owner);
    return shards_.keeps_same_part(partner) ? bytes_of(flat, shard.begin, shard.numel()) : at::Tensor();
  };
  return start(
      {OperationKind::kBetweenNodes, step_, bucket}, flat.device(), [&](int r) { return shard_for(shards_.rank(), r); },
      [&](int r) { return shard_for(r, r); });
}

std::unique_ptr<PendingExchange> ShardExchange::gather_in_node(const at::Tensor& flat, int bucket) {
  const auto part_for = [&](int keeper, int partner) {
    const Shard part = shards_.node_part(bucket, keeper);
    return shards_.shares_node(partner) ? bytes_of(flat, part.begin, part.numel()) : at::Tensor();
  };
  return start(
      {OperationKind::kParameters, step_, bucket}, flat.device(), [&](int r) { return part_for(shards_.rank(), r); },
      [&](int r) { return part_for(r, r); });
}

void ShardExchange::gather_parameter(const at::Tensor& flat, int parameter, int what) {
  constexpr int kWhats = 16;
  const auto piece_of_rank = [&](int r) {
    const Piece piece = shards_.piece_of(parameter, r);
    return bytes_of(flat, piece.parameter_offset, piece.numel);
  };
  start(
      {OperationKind::kOther, step_, parameter * kWhats + what}, flat.device(),
      [&](int /*r*/) { return piece_of_rank(shards_.rank()); }, piece_of_rank)
      ->wait();
}

}  // namespace pannier
