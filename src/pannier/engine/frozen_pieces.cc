#include "pannier/engine/frozen_pieces.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "pannier/base/units.h"
#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/stored_values.h"

namespace pannier {
namespace {

constexpr std::size_t kPartNbytes = std::size_t{1} << 20;

at::ScalarType dtype_of(const Parts& parts, int parameter) {
  return parts.parameters->dtype(parts.model_layout->bucket_of(parameter));
}

bool is_partitioned(const Parts& parts, int parameter) {
  return !parts.residence->rests_whole(parts.model_layout->bucket_of(parameter));
}

}  // namespace

std::vector<int> partitioned_of(const Parts* parts, const std::vector<NamedTensor>& frozen) {
  std::vector<int> result;
  if (parts == nullptr) {
    return result;
  }
  std::set<std::string> names;
  for (const auto& named : frozen) {
    names.insert(named.name);
  }
  for (int b = parts->layout->num_buckets(); b < parts->model_layout->num_buckets(); ++b) {
    for (const Segment& segment : parts->model_layout->buckets()[static_cast<std::size_t>(b)].segments) {
      if (is_partitioned(*parts, segment.parameter) && names.contains(parts->parameters->name(segment.parameter))) {
        result.push_back(segment.parameter);
      }
    }
  }
  return result;
}

std::vector<NamedTensor> whole_of(const Parts* parts, const std::vector<NamedTensor>& frozen) {
  std::set<std::string> names;
  for (const int parameter : partitioned_of(parts, frozen)) {
    names.insert(parts->parameters->name(parameter));
  }
  std::vector<NamedTensor> whole;
  std::ranges::copy_if(frozen, std::back_inserter(whole),
                       [&](const auto& named) { return !names.contains(named.name); });
  return whole;
}

void describe_frozen(const Parts& parts, const std::vector<int>& parameters, ckpt::Manifest& manifest) {
  for (const int i : parameters) {
    const at::Tensor& parameter = parts.parameters->parameter(i);
    const std::string& name = parts.parameters->name(i);
    const auto order = memory_order(parameter.sizes(), parameter.strides());
    if (!is_row_major(order)) {
      manifest.attributes["order." + name] = order_text(order);
    }
    manifest.tensors.push_back(
        {model_tensor(name), checkpoint_dtype(dtype_of(parts, i), name), in_order(parameter.sizes(), order)});
  }
}

FrozenPieces::FrozenPieces(Device& device, HostMemory& memory, Parts& parts, const std::vector<int>& parameters)
    : device_(device), parts_(parts) {
  for (const int parameter : parameters) {
    const ShardPiece& piece = parts.model_shards->piece_of(parameter);
    if (piece.numel == 0) {
      continue;
    }
    Source source{
        .piece = piece, .bucket = parts.model_layout->bucket_of(parameter), .dtype = dtype_of(parts, parameter)};
    if (parts.nvme_shards == nullptr) {
      parts.residence->settle(source.bucket);
      source.in_memory = parts.residence->host_address(source.bucket);
      if (source.in_memory == nullptr) {
        kept_.push_back(parts.residence->own(source.bucket));
        source.in_memory = static_cast<const std::byte*>(kept_.back().data_ptr());
        source.is_on_device = !device.torch_device().is_cpu();
      }
      source.in_memory += nbytes_of(piece.shard_offset, source.width());
    }
    sources_.push_back(source);
  }
  if (parts.nvme_shards != nullptr && !sources_.empty()) {
    chunk_ = HostSlab(memory, parts.nvme_shards->disk().staging().chunk_nbytes, {.owner = "checkpoint"});
  }
}

std::size_t FrozenPieces::nbytes() const noexcept {
  std::size_t sum = 0;
  for (const Source& source : sources_) {
    sum += source.nbytes();
  }
  return sum;
}

std::vector<ckpt::ShareEntry> FrozenPieces::entries() const {
  std::vector<ckpt::ShareEntry> entries;
  for (const Source& source : sources_) {
    const std::string& name = parts_.parameters->name(source.piece.parameter);
    entries.push_back({model_tensor(name), checkpoint_dtype(source.dtype, name), source.piece.parameter_offset,
                       source.piece.parameter_offset + source.piece.numel});
  }
  return entries;
}

void FrozenPieces::visit(const std::function<void(std::span<const std::byte>)>& use) {
  for (const Source& source : sources_) {
    source.in_memory != nullptr ? visit_memory(source, use) : visit_disk(source, use);
  }
}

void FrozenPieces::visit_memory(const Source& source, const std::function<void(std::span<const std::byte>)>& use) {
  for (std::size_t at = 0; at < source.nbytes(); at += kPartNbytes) {
    const std::size_t nbytes = std::min(kPartNbytes, source.nbytes() - at);
    if (!source.is_on_device) {
      use({source.in_memory + at, nbytes});
      continue;
    }
    part_.resize(nbytes);
    device_.copy_down(part_.data(), source.in_memory + at, nbytes);
    use(part_);
  }
}

// The store counts units, which may be smaller than elements.
void FrozenPieces::visit_disk(const Source& source, const std::function<void(std::span<const std::byte>)>& use) {
  NvmeStateStore& disk = parts_.nvme_shards->disk();
  const std::size_t unit = parts_.nvme_shards->unit_nbytes();
  const auto units = static_cast<std::int64_t>(source.width() / unit);
  const std::int64_t end = (source.piece.shard_offset + source.piece.numel) * units;
  for (std::int64_t at = source.piece.shard_offset * units; at < end;) {
    const ChunkId chunk = disk.chunk_of(source.bucket, at);
    std::optional<StateView> view = disk.resting(chunk);
    if (!view) {
      disk.read_apart(chunk, chunk_.data()).wait_done();
      disk.verify_apart(chunk, chunk_.data().data());
      view = disk.view_apart(chunk, chunk_.data().data());
    }
    const std::int64_t to = std::min(end, view->range.end);
    use({static_cast<const std::byte*>(view->param) + nbytes_of(at - view->range.begin, unit),
         nbytes_of(to - at, unit)});
    at = to;
  }
}

FrozenLoading::FrozenLoading(Device& device, ckpt::CheckpointReader& reader, Parts& parts, std::vector<int> parameters,
                             std::function<std::string(const std::string&)> stored_name)
    : device_(device),
      reader_(reader),
      parts_(parts),
      parameters_(std::move(parameters)),
      stored_name_(std::move(stored_name)) {}

std::string FrozenLoading::tensor_of(int parameter) const {
  return model_tensor(stored_name_(parts_.parameters->name(parameter)));
}

template <class Use>
void FrozenLoading::for_each_piece(const Use& use) const {
  for (const int parameter : parameters_) {
    const ShardPiece& piece = parts_.model_shards->piece_of(parameter);
    if (piece.numel > 0 && reader_.find(tensor_of(parameter)) != nullptr) {
      use(parameter, piece);
    }
  }
}

// Whether bytes can go from the file to where the piece rests as they are.
bool FrozenLoading::is_in_runs(int parameter) const {
  const std::string tensor = tensor_of(parameter);
  const at::Tensor& owner = parts_.parameters->parameter(parameter);
  return torch_dtype(reader_.find(tensor)->dtype) == dtype_of(parts_, parameter) &&
         lies_as_stored(reader_, tensor, reader_.attribute("order." + stored_name_(parts_.parameters->name(parameter))),
                        owner.sizes(), memory_order(owner.sizes(), owner.strides()));
}

std::vector<ckpt::TensorRun> FrozenLoading::runs() const {
  std::vector<ckpt::TensorRun> runs;
  for_each_piece([&](int parameter, const ShardPiece& piece) {
    if (is_in_runs(parameter)) {
      runs.push_back({tensor_of(parameter), piece.parameter_offset, piece.parameter_offset + piece.numel});
    }
  });
  return runs;
}

// All of a parameter that is stored in another order or type, flat in its own.
at::Tensor FrozenLoading::turned(int parameter) const {
  const at::Tensor& owner = parts_.parameters->parameter(parameter);
  const std::string tensor = tensor_of(parameter);
  const ckpt::TensorInfo* info = reader_.find(tensor);
  const auto order =
      order_from(reader_.attribute("order." + stored_name_(parts_.parameters->name(parameter))), info->shape.size());
  std::vector<std::byte> bytes(static_cast<std::size_t>(*info->checked_numel()) * dtype_nbytes(info->dtype));
  reader_.read(tensor, 0, bytes);
  std::vector<std::int64_t> dimension_in_file(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    dimension_in_file[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  const at::Tensor stored = at::from_blob(bytes.data(), info->shape, torch_dtype(info->dtype));
  const at::Tensor flat = at::empty({owner.numel()}, at::TensorOptions().dtype(dtype_of(parts_, parameter)));
  parts_.parameters->view_like_parameter(flat, parameter).copy_(stored.permute(dimension_in_file));
  return flat;
}

void FrozenLoading::read_into(int parameter, const ShardPiece& piece, ckpt::VerifiedReads& reads,
                              const std::function<void(std::size_t, std::span<const std::byte>)>& write) {
  const std::size_t width = c10::elementSize(dtype_of(parts_, parameter));
  const std::size_t nbytes = nbytes_of(piece.numel, width);
  if (!is_in_runs(parameter)) {
    const at::Tensor whole = turned(parameter);
    const auto* const values = static_cast<const std::byte*>(whole.data_ptr());
    write(0, {values + nbytes_of(piece.parameter_offset, width), nbytes});
    return;
  }
  std::vector<std::byte> part;
  for (std::size_t at = 0; at < nbytes; at += part.size()) {
    part.resize(std::min(kPartNbytes, nbytes - at));
    reads.read(part);
    write(at, part);
  }
}

void FrozenLoading::load(ckpt::VerifiedReads& reads) {
  int open = -1;
  std::byte* at_rest = nullptr;
  at::Tensor own;
  const auto close = [&] {
    if (open >= 0 && at_rest == nullptr) {
      parts_.residence->put_back(open);
    }
    own = at::Tensor();
  };
  for_each_piece([&](int parameter, const ShardPiece& piece) {
    if (const int bucket = parts_.model_layout->bucket_of(parameter); bucket != open) {
      close();
      parts_.residence->settle(bucket);
      at_rest = parts_.residence->host_address(bucket);
      own = at_rest == nullptr ? parts_.residence->own(bucket) : at::Tensor();
      open = bucket;
    }
    const std::size_t begin = nbytes_of(piece.shard_offset, c10::elementSize(dtype_of(parts_, parameter)));
    read_into(parameter, piece, reads, [&](std::size_t offset, std::span<const std::byte> bytes) {
      if (at_rest != nullptr) {
        std::memcpy(at_rest + begin + offset, bytes.data(), bytes.size());
      } else {
        bytes_from_host(device_, own, begin + offset, bytes.data(), bytes.size());
      }
    });
  });
  close();
  if (parts_.gathering != nullptr) {
    parts_.gathering->expect_changes(parts_.model_layout->num_buckets());
  }
}

}  // namespace pannier
