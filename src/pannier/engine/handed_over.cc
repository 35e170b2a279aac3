#include "pannier/engine/handed_over.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "pannier/base/units.h"

namespace pannier {

std::vector<HandedOver> hand_over(Parts& parts, const std::vector<int>& managed_of) {
  std::vector<HandedOver> result;
  if (parts.gatherer == nullptr || parts.nvme_shards != nullptr) {
    return result;
  }
  for (std::size_t i = 0; i < managed_of.size(); ++i) {
    const int bucket = managed_of[i] < 0 ? -1 : parts.model_layout->bucket_of(managed_of[i]);
    if (bucket < 0 || parts.residence->rests_whole(bucket)) {
      continue;
    }
    const ShardPiece& piece = parts.model_shards->piece_of(managed_of[i]);
    const at::ScalarType dtype = parts.parameters->dtype(bucket);
    HandedOver left{static_cast<std::int64_t>(i), piece.parameter_offset, at::empty({piece.numel}, dtype)};
    parts.residence->settle(bucket);
    const std::byte* const resting = parts.residence->host_address(bucket);
    if (piece.numel > 0 && resting == nullptr) {
      left.values = parts.residence->own(bucket).narrow(0, piece.shard_offset, piece.numel);
    } else if (piece.numel > 0) {
      const std::size_t width = c10::elementSize(dtype);
      std::memcpy(left.values.data_ptr(), resting + nbytes_of(piece.shard_offset, width),
                  nbytes_of(piece.numel, width));
    }
    result.push_back(std::move(left));
  }
  return result;
}

}  // namespace pannier
