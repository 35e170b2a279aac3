#include "pannier/comm/shard_exchange.h"

#include <ATen/ATen.h>

#include <utility>

namespace pannier {
namespace {

at::Tensor bytes_of(const at::Tensor& flat, std::int64_t begin, std::int64_t numel) {
  return flat.narrow(0, begin, numel).view(at::kByte);
}

}  // namespace

ShardExchange::Scattered ShardExchange::scatter(const at::Tensor& flat, int bucket) {
  Scattered scattered;
  ExchangeBuffers buffers{.device = flat.device(), .stamps = StampPlace::kApart};
  const Shard& mine = shards_.shard(bucket);
  for (int r = 0; r < shards_.world_size(); ++r) {
    const Shard& theirs = shards_.shard(bucket, r);
    const bool is_own = r == shards_.rank();
    scattered.parts.push_back(is_own ? flat.narrow(0, mine.begin, mine.numel())
                                     : at::empty({mine.numel()}, flat.options()));
    buffers.send.push_back(is_own ? at::Tensor() : bytes_of(flat, theirs.begin, theirs.numel()));
    buffers.receive.push_back(is_own ? at::Tensor() : bytes_of(scattered.parts.back(), 0, mine.numel()));
  }
  scattered.pending = communicator_.exchange({OperationKind::kGradients, step_, bucket}, std::move(buffers));
  return scattered;
}

std::unique_ptr<PendingExchange> ShardExchange::gather(const at::Tensor& flat, int bucket) {
  ExchangeBuffers buffers{.device = flat.device(), .stamps = StampPlace::kApart};
  const Shard& mine = shards_.shard(bucket);
  for (int r = 0; r < shards_.world_size(); ++r) {
    const Shard& theirs = shards_.shard(bucket, r);
    const bool is_own = r == shards_.rank();
    buffers.send.push_back(is_own ? at::Tensor() : bytes_of(flat, mine.begin, mine.numel()));
    buffers.receive.push_back(is_own ? at::Tensor() : bytes_of(flat, theirs.begin, theirs.numel()));
  }
  return communicator_.exchange({OperationKind::kParameters, step_, bucket}, std::move(buffers));
}

void ShardExchange::gather_parameter(const at::Tensor& flat, int parameter, int what) {
  ExchangeBuffers buffers{.device = flat.device(), .stamps = StampPlace::kApart};
  const Piece& mine = shards_.piece_of(parameter);
  for (int r = 0; r < shards_.world_size(); ++r) {
    const Piece theirs = shards_.piece_of(parameter, r);
    const bool is_own = r == shards_.rank();
    buffers.send.push_back(is_own ? at::Tensor() : bytes_of(flat, mine.parameter_offset, mine.numel));
    buffers.receive.push_back(is_own ? at::Tensor() : bytes_of(flat, theirs.parameter_offset, theirs.numel));
  }
  constexpr int kWhats = 16;
  communicator_.exchange({OperationKind::kOther, step_, parameter * kWhats + what}, std::move(buffers))->wait();
}

}  // namespace pannier
