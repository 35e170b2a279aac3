#include "pannier/zero/first_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

namespace pannier {

at::Tensor joined_shares(Communicator& communicator, Device& device, const at::Tensor& share) {
  if (!share.defined()) {
    return {};
  }
  const at::Tensor whole =
      at::empty({share.numel() * communicator.world_size()}, share.options().device(device.torch_device()));
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const at::Tensor part = whole.narrow(0, rank * share.numel(), share.numel());
    if (rank == communicator.rank()) {
      part.copy_(share);
    }
    communicator.broadcast(part, rank);
  }
  return whole;
}

void place_frozen(Parts& parts, Communicator& communicator) {
  const c10::NoGradGuard no_grad;
  for (int b = parts.layout->num_buckets(); b < parts.model_layout->num_buckets(); ++b) {
    parts.parameters->fill(b, [&](const Segment& segment, const at::Tensor& values) {
      const at::Tensor flat = parts.parameters->bucket(b).narrow(0, segment.offset, segment.numel);
      flat.copy_(values);
      if (communicator.world_size() > 1) {
        communicator.broadcast(flat, 0);
      }
    });
    parts.residence->put_to_rest(b);
  }
}

}  // namespace pannier
