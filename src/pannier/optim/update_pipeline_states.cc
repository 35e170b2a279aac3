// Making, reading and changing the states of parameters: what the pipeline does beside the update.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/device/dtype.h"
#include "pannier/optim/update_pipeline.h"

namespace pannier {
namespace {

template <class T>
T* at_element(void* base, std::int64_t offset) {
  return static_cast<T*>(base) + offset;
}

void* at_element(void* base, std::int64_t offset, std::size_t width) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + nbytes_of(offset, width);
}

const void* at_element(const void* base, std::int64_t offset, std::size_t width) {
  return static_cast<const char*>(base) + nbytes_of(offset, width);
}

void* address_of(const StateView& view, UpdatePipeline::Array array) {
  return array == UpdatePipeline::Array::kRest     ? view.rest
         : array == UpdatePipeline::Array::kState1 ? view.state1
                                                   : view.state2;
}

ElementRange range_of(const ShardPiece& piece) { return {piece.shard_offset, piece.shard_offset + piece.numel}; }

// A bucket that is whole as long as this lives.
class Whole {
 public:
  Whole(ParameterResidence& residence, int bucket) : residence_(residence), bucket_(bucket) {
    residence.make_whole(bucket);
  }
  ~Whole() {
    try {
      residence_.let_rest(bucket_);
    } catch (const std::exception& error) {
      log::warning(fmt::format("bucket {} stays whole: {}", bucket_, error.what()));
    }
  }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  ParameterResidence& residence_;
  int bucket_;
};

}  // namespace

// Ranks may have started from seeds of their own; what counts is rank 0's model.
at::Tensor UpdatePipeline::as_rank_0_has_them(const at::Tensor& values) {
  const at::Tensor fp32 = values.to(parts_.device.torch_device()).to(at::kFloat);
  if (parts_.shards.world_size() == 1) {
    return fp32;
  }
  const at::Tensor common = fp32.clone();  // The caller's own memory stays as it is.
  parts_.communicator.broadcast(common, 0);
  return common;
}

void UpdatePipeline::initialize() {
  const c10::NoGradGuard no_grad;
  for (int b = 0; b < num_buckets(); ++b) {
    ChunkCursor states(*parts_.routes.rest_way(b).states, b, Access::kUpdate);
    parts_.parameters.fill(b, [&](const Segment& segment, const at::Tensor& values) {
      const at::Tensor fp32 = as_rank_0_has_them(values);
      set_master(segment.parameter, states, fp32.data_ptr<float>());
      const ShardPiece& piece = parts_.shards.piece_of(segment.parameter);
      if (parts_.initial_state1 != 0.0 && !parts_.state_names.empty()) {
        const at::Tensor start = at::full({piece.numel}, parts_.initial_state1, fp32.options());
        write_piece(start.data_ptr(), piece, states, Array::kState1);
      }
    });
    states.close();
    parts_.residence.put_to_rest(b);
  }
}

std::size_t UpdatePipeline::width_of(Array array) const {
  return array == Array::kRest && parts_.format == kernels::StateFormat::kBf16 ? 2 : 4;
}

// `values`: those of the piece's elements, on the device.
void UpdatePipeline::write_piece(const void* values, const ShardPiece& piece, ChunkCursor& states, Array array) {
  const std::size_t width = width_of(array);
  UpdatePath& path = *rest_way(piece.parameter).path;
  states.visit(range_of(piece), [&](const StateView& view, const ElementRange& part) {
    path.write_state(at_element(address_of(view, array), part.begin - view.range.begin, width),
                     at_element(values, part.begin - piece.shard_offset, width), nbytes_of(part.numel(), width));
  });
}

void UpdatePipeline::set_master(int parameter, ChunkCursor& states, const float* values) {
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const at::Tensor flat = parts_.parameters.bucket(bucket_of(parameter));
  void* on_device = parts_.parameters.address(parameter);
  Compute& device = parts_.device.compute();
  const std::int64_t n = parts_.shards.buckets().segment_of(parameter).numel;
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_on_device(on_device, values, nbytes_of(n, 4));
      break;
    case kernels::StateFormat::kFp16:
      device.to_fp16(values, static_cast<std::uint16_t*>(on_device), n);
      write_piece(values + piece.parameter_offset, piece, states, Array::kRest);
      break;
    case kernels::StateFormat::kBf16: {
      const at::Tensor lo = at::empty({n}, at::TensorOptions().dtype(at::kShort).device(flat.device()));
      device.split_master(values, static_cast<std::uint16_t*>(on_device), lo.data_ptr<std::int16_t>(), n);
      write_piece(lo.data_ptr<std::int16_t>() + piece.parameter_offset, piece, states, Array::kRest);
      break;
    }
  }
  states.visit(range_of(piece), [&](const StateView& view, const ElementRange& part) {
    rest_way(parameter).path->fetch(bucket_of(parameter), view, part);
  });
}

void UpdatePipeline::set_master_from_parameter(const ShardPiece& piece) {
  UpdatePath& path = *rest_way(piece.parameter).path;
  ChunkCursor states = cursor_of(piece.parameter, Access::kUpdate);
  states.visit(range_of(piece), [&](const StateView& view, const ElementRange& part) {
    path.fetch(bucket_of(piece.parameter), view, part);
    const std::int64_t offset = part.begin - view.range.begin;
    switch (parts_.format) {
      case kernels::StateFormat::kFp32:
        break;
      case kernels::StateFormat::kFp16:
        path.compute().accumulate(at_element<float>(view.rest, offset), at_element(view.param, offset, 2),
                                  kernels::GradType::kFp16, part.numel(), true);
        break;
      case kernels::StateFormat::kBf16:
        // The rest belongs to the value before the edit; with it the join would be another number, or NaN.
        path.zero_state(at_element<std::int16_t>(view.rest, offset), nbytes_of(part.numel(), 2));
        break;
    }
  });
}

void UpdatePipeline::take_edits(const std::vector<int>& parameters) {
  for (const int parameter : parameters) {
    if (const ShardPiece& piece = parts_.shards.piece_of(parameter); piece.numel > 0) {
      set_master_from_parameter(piece);
    }
    parts_.residence.keep(bucket_of(parameter));
    parts_.residence.put_back(bucket_of(parameter));
  }
}

UpdatePipeline::Array UpdatePipeline::array_of(const std::string& name) const {
  for (std::size_t i = 0; i < parts_.state_names.size(); ++i) {
    if (parts_.state_names[i] == name) {
      return i == 0 ? Array::kState1 : Array::kState2;
    }
  }
  throw ConfigError(fmt::format("no optimizer state is called '{}'; this optimizer keeps [{}] and 'fp32_param'", name,
                                fmt::join(parts_.state_names, ", ")));
}

// Fills `whole`, which has the state's type and the parameter's elements, from the pieces of all ranks.
void UpdatePipeline::read_piece(const at::Tensor& whole, const ShardPiece& piece, Array array) {
  const std::size_t width = width_of(array);
  UpdatePath& path = *rest_way(piece.parameter).path;
  ChunkCursor states = cursor_of(piece.parameter, Access::kRead);
  states.visit(range_of(piece), [&](const StateView& view, const ElementRange& part) {
    path.read_state(at_element(whole.data_ptr(), part.begin - piece.shard_offset + piece.parameter_offset, width),
                    at_element(address_of(view, array), part.begin - view.range.begin, width),
                    nbytes_of(part.numel(), width));
  });
  parts_.exchange.gather_parameter(whole, piece.parameter, static_cast<int>(array));
}

at::Tensor UpdatePipeline::read(int parameter, const std::string& name) {
  const c10::NoGradGuard no_grad;
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const std::int64_t numel = parts_.shards.buckets().segment_of(parameter).numel;
  std::optional<Whole> whole;
  if (name == "fp32_param") {
    whole.emplace(parts_.residence, bucket_of(parameter));
  }
  const at::TensorOptions options = parts_.parameters.parameter(parameter).options().requires_grad(false);
  const at::Tensor flat = at::empty({numel}, options.dtype(at::kFloat));
  if (name != "fp32_param") {
    read_piece(flat, piece, array_of(name));
  } else if (parts_.format == kernels::StateFormat::kFp32) {
    parts_.device.copy_on_device(flat.data_ptr(), parts_.parameters.address(parameter), flat.nbytes());
  } else if (parts_.format == kernels::StateFormat::kFp16) {
    read_piece(flat, piece, Array::kRest);
  } else {
    const at::Tensor lo = at::empty({numel}, options.dtype(at::kShort));
    read_piece(lo, piece, Array::kRest);
    parts_.device.compute().join_master(static_cast<const std::uint16_t*>(parts_.parameters.address(parameter)),
                                        lo.data_ptr<std::int16_t>(), flat.data_ptr<float>(), numel);
  }
  parts_.residence.put_back(bucket_of(parameter));
  return parts_.parameters.view_like_parameter(flat, parameter).clone();
}

void UpdatePipeline::write(int parameter, const std::string& name, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& owner = parts_.parameters.parameter(parameter);
  if (value.sizes() != owner.sizes()) {
    throw ConfigError(fmt::format("{} of parameter {} has shape {}, got {}", name, parts_.parameters.name(parameter),
                                  owner.sizes().vec(), value.sizes().vec()));
  }
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const at::Tensor flat = at::empty({owner.numel()}, at::TensorOptions().dtype(at::kFloat).device(owner.device()));
  parts_.parameters.view_like_parameter(flat, parameter).copy_(value);
  std::optional<Whole> whole;
  if (name == "fp32_param") {
    whole.emplace(parts_.residence, bucket_of(parameter));
  }
  ChunkCursor states = cursor_of(parameter, Access::kUpdate);
  if (name == "fp32_param") {
    set_master(parameter, states, flat.data_ptr<float>());
    states.close();
    parts_.residence.keep(bucket_of(parameter));
    parts_.parameters.bump_version(parameter);
  } else {
    write_piece(flat.data_ptr<float>() + piece.parameter_offset, piece, states, array_of(name));
  }
  parts_.residence.put_back(bucket_of(parameter));
}

}  // namespace pannier
