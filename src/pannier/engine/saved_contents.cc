#include "pannier/engine/saved_contents.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/frozen_pieces.h"
#include "pannier/engine/random_states.h"
#include "pannier/io/checksum.h"

namespace pannier {
namespace {

at::Tensor contiguous(const at::Tensor& tensor) { return tensor.detach().contiguous(); }

TensorCopy copy_of(Device& device, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor flat = contiguous(tensor);
  TensorCopy copy{{name, checkpoint_dtype(flat.scalar_type(), name), flat.sizes().vec()},
                  std::vector<std::byte>(flat.nbytes())};
  bytes_to_host(device, copy.bytes.data(), flat, 0, flat.nbytes());
  return copy;
}

// A parameter that is whole on all ranks is the same there: each writes about as many bytes of them.
void take_frozen(const Communicator& ranks, const Parts* parts, const CheckpointContents& contents,
                 SavedContents& saved) {
  std::vector<std::size_t> nbytes(static_cast<std::size_t>(ranks.world_size()));
  for (const auto& named : whole_of(parts, contents.frozen)) {
    const auto least = std::min_element(nbytes.begin(), nbytes.end());
    *least += named.tensor.nbytes();
    if (least - nbytes.begin() == ranks.rank()) {
      saved.frozen.push_back({named.name, contiguous(named.tensor)});
      saved.versions.push_back(named.tensor._version());
    }
  }
}

std::vector<TensorCopy> take_extras(Device& device, const Communicator& ranks, const CheckpointContents& contents,
                                    const std::vector<std::uint64_t>& sums_of_rank_0) {
  std::vector<TensorCopy> extras;
  for (const auto& [name, tensor] : random_states(device.torch_device())) {
    extras.push_back(copy_of(device, name, tensor));
  }
  for (const auto& [name, bytes] : contents.bytes) {
    extras.push_back(copy_of(device, kBytesPrefix + name, bytes));
  }
  const auto own_sums = ranks.rank() > 0 ? buffer_sums(device, contents.buffers) : std::vector<std::uint64_t>();
  for (std::size_t i = 0; i < own_sums.size(); ++i) {
    if (i >= sums_of_rank_0.size() || own_sums[i] != sums_of_rank_0[i]) {
      extras.push_back(copy_of(device, kBufferPrefix + contents.buffers[i].name, contents.buffers[i].tensor));
    }
  }
  return extras;
}

void describe_trained(const Parts& parts, ckpt::Manifest& manifest) {
  for (int i = 0; i < parts.layout->num_parameters(); ++i) {
    const at::Tensor& parameter = parts.parameters->parameter(i);
    const std::string& name = parts.parameters->name(i);
    const auto order = memory_order(parameter.sizes(), parameter.strides());
    const auto shape = in_order(parameter.sizes(), order);
    if (!is_row_major(order)) {
      manifest.attributes["order." + name] = order_text(order);
    }
    manifest.tensors.push_back({model_tensor(name), ckpt::DType::kF32, shape});
    for (const auto& state : parts.pipeline->state_names()) {
      manifest.tensors.push_back({state_tensor(state, name), ckpt::DType::kF32, shape});
    }
  }
}

ckpt::Manifest describe(const Communicator& ranks, const Parts* parts, const CheckpointContents& contents) {
  ckpt::Manifest manifest;
  manifest.world_size = ranks.world_size();
  manifest.attributes = contents.attributes;
  if (parts != nullptr) {
    describe_trained(*parts, manifest);
    describe_frozen(*parts, partitioned_of(parts, contents.frozen), manifest);
  }
  const std::vector<NamedTensor> whole = whole_of(parts, contents.frozen);
  for (const auto* list : {&whole, &contents.buffers}) {
    for (const auto& [name, tensor] : *list) {
      manifest.tensors.push_back(
          {model_tensor(name), checkpoint_dtype(tensor.scalar_type(), name), tensor.sizes().vec()});
    }
  }
  for (const auto& buffer : contents.buffers) {
    manifest.attributes["kind." + buffer.name] = "buffer";
  }
  for (const auto& [other, first] : contents.aliases) {
    manifest.attributes["alias." + other] = first;
  }
  if (contents.excludes_frozen) {
    manifest.attributes["excludes_frozen"] = "true";
  }
  return manifest;
}

}  // namespace

std::vector<std::uint64_t> buffer_sums(Device& device, const std::vector<NamedTensor>& buffers) {
  std::vector<std::uint64_t> sums;
  for (const auto& [name, tensor] : buffers) {
    sums.push_back(checksum(copy_of(device, name, tensor).bytes));
  }
  return sums;
}

SavedContents take_contents(Device& device, const Communicator& ranks, const Parts* parts,
                            const CheckpointContents& contents, const std::vector<std::uint64_t>& sums_of_rank_0) {
  SavedContents saved;
  take_frozen(ranks, parts, contents, saved);
  for (std::size_t i = 0; i < contents.buffers.size() && ranks.rank() == 0; ++i) {
    saved.buffers.push_back(copy_of(device, model_tensor(contents.buffers[i].name), contents.buffers[i].tensor));
  }
  saved.extras = take_extras(device, ranks, contents, sums_of_rank_0);
  saved.manifest = describe(ranks, parts, contents);
  return saved;
}

}  // namespace pannier
