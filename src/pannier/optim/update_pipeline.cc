#include "pannier/optim/update_pipeline.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/device/dtype.h"

namespace pannier {
namespace {

template <class T>
T* at_element(void* base, std::int64_t offset) {
  return static_cast<T*>(base) + offset;
}

void* at_element(void* base, std::int64_t offset, std::size_t width) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + nbytes_of(offset, width);
}

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
    std::optional<Lease> lease;
    parts_.parameters.fill(b, [&](const Segment& segment, const at::Tensor& values) {
      if (!lease) {
        lease.emplace(parts_.routes.rest_way(b).states->lease(b));
      }
      const at::Tensor fp32 = as_rank_0_has_them(values);
      set_master(segment.parameter, lease->view(), fp32.data_ptr<float>());
      const ShardPiece& piece = parts_.shards.piece_of(segment.parameter);
      if (parts_.initial_state1 != 0.0 && lease->view().state1 != nullptr) {
        const at::Tensor start = at::full({piece.numel}, parts_.initial_state1, fp32.options());
        parts_.routes.rest_way(b).path->write_state(lease->view().state1 + piece.shard_offset, start.data_ptr(),
                                                    start.nbytes());
      }
    });
    lease.reset();
    parts_.residence.keep(b);
    parts_.residence.let_rest(b);
  }
}

void UpdatePipeline::set_master(int parameter, const StateView& view, const float* values) {
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const at::Tensor flat = parts_.parameters.bucket(bucket_of(parameter));
  void* on_device = parts_.parameters.address(parameter);
  Compute& device = parts_.device.compute();
  const std::int64_t n = parts_.shards.buckets().segment_of(parameter).numel;
  UpdatePath& path = *rest_way(parameter).path;
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_on_device(on_device, values, nbytes_of(n, 4));
      break;
    case kernels::StateFormat::kFp16:
      device.to_fp16(values, static_cast<std::uint16_t*>(on_device), n);
      path.write_state(at_element<float>(view.rest, piece.shard_offset), values + piece.parameter_offset,
                       nbytes_of(piece.numel, 4));
      break;
    case kernels::StateFormat::kBf16: {
      const at::Tensor lo = at::empty({n}, at::TensorOptions().dtype(at::kShort).device(flat.device()));
      device.split_master(values, static_cast<std::uint16_t*>(on_device), lo.data_ptr<std::int16_t>(), n);
      path.write_state(at_element<std::int16_t>(view.rest, piece.shard_offset),
                       lo.data_ptr<std::int16_t>() + piece.parameter_offset, nbytes_of(piece.numel, 2));
      break;
    }
  }
  path.fetch(bucket_of(parameter), view, piece.shard_offset, piece.shard_offset + piece.numel);
}

void UpdatePipeline::set_master_from_parameter(const ShardPiece& piece, const StateView& view) {
  UpdatePath& path = *rest_way(piece.parameter).path;
  path.fetch(bucket_of(piece.parameter), view, piece.shard_offset, piece.shard_offset + piece.numel);
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      break;
    case kernels::StateFormat::kFp16:
      path.compute().accumulate(at_element<float>(view.rest, piece.shard_offset),
                                at_element(view.param, piece.shard_offset, 2), kernels::GradType::kFp16, piece.numel,
                                true);
      break;
    case kernels::StateFormat::kBf16:
      // The rest belongs to the value before the edit; with it the join would be another number, or NaN.
      path.zero_state(at_element<std::int16_t>(view.rest, piece.shard_offset), nbytes_of(piece.numel, 2));
      break;
  }
}

void UpdatePipeline::take_edits(const std::vector<int>& parameters) {
  for (const int parameter : parameters) {
    if (const ShardPiece& piece = parts_.shards.piece_of(parameter); piece.numel > 0) {
      const Lease lease = lease_of(parameter);
      set_master_from_parameter(piece, lease.view());
    }
    parts_.residence.keep(bucket_of(parameter));
    parts_.residence.put_back(bucket_of(parameter));
  }
}

kernels::UpdateTask UpdatePipeline::task_of(const ShardPiece& piece, const StateView& view,
                                            const kernels::UpdateCoefficients& constants) {
  const GradientView gradient = parts_.gradients.view(piece.parameter);
  PANNIER_CHECK(gradient.data != nullptr, fmt::format("no gradient for parameter {}", piece.parameter));
  const auto shape = state_shape_of(parts_.format, static_cast<int>(parts_.state_names.size()));
  return {constants,
          {.param = at_element(view.param, piece.shard_offset, shape.param_nbytes),
           .rest = at_element(view.rest, piece.shard_offset, shape.rest_nbytes),
           .state1 = static_cast<float*>(at_element(view.state1, piece.shard_offset, 4)),
           .state2 = static_cast<float*>(at_element(view.state2, piece.shard_offset, 4)),
           .grad = gradient.data,
           .grad_type = gradient.type,
           .numel = piece.numel}};
}

std::optional<UpdatePipeline::Prepared> UpdatePipeline::prepare(int bucket, const Coefficients& coefficients) {
  std::vector<const ShardPiece*> updated;
  for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
    if (coefficients.at(static_cast<std::size_t>(piece.parameter))) {
      updated.push_back(&piece);
    }
  }
  if (updated.empty()) {
    return std::nullopt;
  }
  const Way& way = parts_.routes.update_way(bucket);
  parts_.residence.settle(bucket);
  Prepared prepared{way.states->lease(bucket), {.bucket = bucket, .tasks = {}, .parameter = {}}};
  const StateView& view = prepared.lease.view();
  for (const ShardPiece* piece : updated) {
    prepared.update.tasks.push_back(task_of(*piece, view, *coefficients[static_cast<std::size_t>(piece->parameter)]));
  }
  prepared.update.parameter = way.path->way_to_model(bucket, view);
  return prepared;
}

std::int64_t UpdatePipeline::update_bucket(int bucket, const Coefficients& coefficients,
                                           const kernels::UpdateControl& control) {
  const std::optional<Prepared> prepared = prepare(bucket, coefficients);
  if (!prepared) {
    return 0;
  }
  UpdatePath& path = *parts_.routes.update_way(bucket).path;
  path.compute().update(parts_.algorithm, parts_.format, prepared->update.tasks, control);
  path.publish(prepared->update.parameter);
  parts_.residence.put_back(bucket);
  drop_gradients(bucket, coefficients);
  return prepared->update.numel();
}

void UpdatePipeline::drop_gradients(int bucket, const Coefficients& coefficients) {
  for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
    if (coefficients[static_cast<std::size_t>(piece.parameter)]) {
      parts_.gradients.drop(piece.parameter);
    }
  }
}

// Buckets are in backward order; the next forward needs the last one first.
void UpdatePipeline::issue(DeviceUpdates& updates, bool wait) {
  for (; updates.next >= 0; --updates.next) {
    const int b = updates.next;
    if (parts_.routes.route(b) == UpdateRoute::kHost) {
      continue;
    }
    if (!wait && !parts_.routes.update_way(b).states->is_ready(b)) {
      return;
    }
    const auto span = parts_.device.trace().queued(Queue::kCompute, {.what = "update", .index = b});
    update_bucket(b, updates.coefficients, updates.control);
  }
}

std::int64_t UpdatePipeline::update_on_host(DeviceUpdates& updates, float grad_factor) {
  std::int64_t numel = 0;
  const std::uint32_t skip = 0;
  for (int b = num_buckets() - 1; b >= 0; --b) {
    if (parts_.routes.route(b) == UpdateRoute::kHost) {
      const auto span = parts_.device.trace().host(TraceRow::kHostUpdates, {.what = "update", .index = b});
      numel += update_bucket(b, updates.coefficients, {&grad_factor, &skip});
      issue(updates, /*wait=*/false);
    }
  }
  return numel;
}

void UpdatePipeline::publish(const Coefficients& coefficients) {
  for (int b = 0; b < num_buckets(); ++b) {
    parts_.routes.update_way(b).path->finish();
  }
  gather_resting_whole();
  for (std::size_t i = 0; i < coefficients.size(); ++i) {
    if (coefficients[i]) {
      parts_.parameters.bump_version(static_cast<int>(i));
    }
  }
}

void UpdatePipeline::publish_loaded() {
  const c10::NoGradGuard no_grad;
  gather_resting_whole();
  for (int i = 0; i < parts_.parameters.num_parameters(); ++i) {
    if (parts_.parameters.has_memory(bucket_of(i))) {
      parts_.parameters.bump_version(i);
    }
  }
}

void UpdatePipeline::gather_resting_whole() {
  std::vector<std::unique_ptr<PendingExchange>> pending;
  for (int b = num_buckets() - 1; b >= 0; --b) {
    if (parts_.residence.rests_whole(b)) {
      pending.push_back(parts_.exchange.gather(parts_.parameters.bucket(b), b));
    }
  }
  for (const auto& exchange : pending) {
    exchange->wait();
  }
}

void UpdatePipeline::set_route(int bucket, UpdateRoute route) {
  const UpdateRoute before = parts_.routes.route(bucket);
  if (before == route) {
    return;
  }
  PANNIER_CHECK(before != UpdateRoute::kDevice && route != UpdateRoute::kDevice,
                fmt::format("bucket {} can't move from route {} to {}", bucket, to_string(before), to_string(route)));
  parts_.routes.set(bucket, route);
  if (route == UpdateRoute::kHost) {
    // The host's copy of the parameter has not followed the updates on the device.
    const Way& way = parts_.routes.rest_way(bucket);
    parts_.residence.settle(bucket);
    const Lease lease = way.states->lease(bucket);
    way.path->fetch(bucket, lease.view(), 0, parts_.shards.shard(bucket).numel());
  }
}

float* UpdatePipeline::state_address(const StateView& view, const std::string& name, std::int64_t offset) const {
  const std::vector<float*> states{view.state1, view.state2};
  for (std::size_t i = 0; i < parts_.state_names.size(); ++i) {
    if (parts_.state_names[i] == name) {
      return states[i] + offset;
    }
  }
  throw ConfigError(fmt::format("no optimizer state is called '{}'; this optimizer keeps [{}] and 'fp32_param'", name,
                                fmt::join(parts_.state_names, ", ")));
}

// Fills `whole`, which has the state's type and the parameter's elements, from the pieces of all ranks.
void UpdatePipeline::read_piece(const at::Tensor& whole, const ShardPiece& piece, const void* state, int what) {
  const auto width = static_cast<std::size_t>(whole.element_size());
  rest_way(piece.parameter)
      .path->read_state(at_element(whole.data_ptr(), piece.parameter_offset, width), state,
                        nbytes_of(piece.numel, width));
  parts_.exchange.gather_parameter(whole, piece.parameter, what);
}

at::Tensor UpdatePipeline::read(int parameter, const std::string& name) {
  const c10::NoGradGuard no_grad;
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const std::int64_t numel = parts_.shards.buckets().segment_of(parameter).numel;
  std::optional<Whole> whole;
  if (name == "fp32_param") {
    whole.emplace(parts_.residence, bucket_of(parameter));
  }
  const Lease lease = lease_of(parameter);
  const StateView& view = lease.view();
  const at::TensorOptions options = parts_.parameters.parameter(parameter).options().requires_grad(false);
  const at::Tensor flat = at::empty({numel}, options.dtype(at::kFloat));
  if (name != "fp32_param") {
    read_piece(flat, piece, state_address(view, name, piece.shard_offset), name == parts_.state_names.front() ? 1 : 2);
  } else if (parts_.format == kernels::StateFormat::kFp32) {
    parts_.device.copy_on_device(flat.data_ptr(), parts_.parameters.address(parameter), flat.nbytes());
  } else if (parts_.format == kernels::StateFormat::kFp16) {
    read_piece(flat, piece, at_element<float>(view.rest, piece.shard_offset), 0);
  } else {
    const at::Tensor lo = at::empty({numel}, options.dtype(at::kShort));
    read_piece(lo, piece, at_element<std::int16_t>(view.rest, piece.shard_offset), 0);
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
  const Lease lease = lease_of(parameter);
  if (name == "fp32_param") {
    set_master(parameter, lease.view(), flat.data_ptr<float>());
    parts_.residence.keep(bucket_of(parameter));
    parts_.parameters.bump_version(parameter);
  } else {
    rest_way(parameter).path->write_state(state_address(lease.view(), name, piece.shard_offset),
                                          flat.data_ptr<float>() + piece.parameter_offset, nbytes_of(piece.numel, 4));
  }
  parts_.residence.put_back(bucket_of(parameter));
}

}  // namespace pannier
