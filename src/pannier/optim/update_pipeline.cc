#include "pannier/optim/update_pipeline.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pannier/base/error.h"
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

}  // namespace

void UpdatePipeline::initialize() {
  const c10::NoGradGuard no_grad;
  for (int b = 0; b < parts_.layout.num_buckets(); ++b) {
    std::optional<Lease> lease;
    parts_.parameters.fill(b, [&](const Segment& segment, const at::Tensor& values) {
      if (!lease) {
        lease.emplace(parts_.routes.rest_way(b).states->lease(b));
      }
      const at::Tensor fp32 = values.to(parts_.device.torch_device()).to(at::kFloat);
      set_master(segment, lease->view(), fp32.data_ptr<float>());
      if (parts_.initial_state1 != 0.0 && lease->view().state1 != nullptr) {
        const at::Tensor start = at::full({segment.numel}, parts_.initial_state1, fp32.options());
        parts_.routes.rest_way(b).path->write_state(lease->view().state1 + segment.offset, start.data_ptr(),
                                                    start.nbytes());
      }
    });
  }
}

void UpdatePipeline::set_master(const Segment& segment, const StateView& view, const float* values) {
  const int bucket = parts_.layout.bucket_of(segment.parameter);
  const at::Tensor flat = parts_.parameters.bucket(bucket);
  void* on_device = at_element(flat.data_ptr(), segment.offset, flat.element_size());
  Compute& device = parts_.device.compute();
  const std::int64_t n = segment.numel;
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_on_device(on_device, values, nbytes_of(n, 4));
      break;
    case kernels::StateFormat::kFp16:
      device.to_fp16(values, static_cast<std::uint16_t*>(on_device), n);
      rest_way(segment.parameter)
          .path->write_state(at_element<float>(view.rest, segment.offset), values, nbytes_of(n, 4));
      break;
    case kernels::StateFormat::kBf16: {
      const at::Tensor lo = at::empty({n}, at::TensorOptions().dtype(at::kShort).device(flat.device()));
      device.split_master(values, static_cast<std::uint16_t*>(on_device), lo.data_ptr<std::int16_t>(), n);
      rest_way(segment.parameter)
          .path->write_state(at_element<std::int16_t>(view.rest, segment.offset), lo.data_ptr(), lo.nbytes());
      break;
    }
  }
  rest_way(segment.parameter).path->fetch(bucket, view, segment.offset, segment.offset + n);
}

void UpdatePipeline::set_master_from_parameter(const Segment& segment, const StateView& view) {
  const int bucket = parts_.layout.bucket_of(segment.parameter);
  UpdatePath& path = *rest_way(segment.parameter).path;
  path.fetch(bucket, view, segment.offset, segment.offset + segment.numel);
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      break;
    case kernels::StateFormat::kFp16:
      path.compute().accumulate(at_element<float>(view.rest, segment.offset), at_element(view.param, segment.offset, 2),
                                kernels::GradType::kFp16, segment.numel, true);
      break;
    case kernels::StateFormat::kBf16:
      // The rest belongs to the value before the edit; with it the join would be another number, or NaN.
      path.zero_state(at_element<std::int16_t>(view.rest, segment.offset), nbytes_of(segment.numel, 2));
      break;
  }
}

void UpdatePipeline::take_edits(const std::vector<int>& parameters) {
  for (const int parameter : parameters) {
    const Lease lease = lease_of(parameter);
    set_master_from_parameter(parts_.layout.segment_of(parameter), lease.view());
  }
}

kernels::UpdateTask UpdatePipeline::task_of(const Segment& segment, const StateView& view,
                                            const kernels::UpdateCoefficients& constants) {
  const GradientView gradient = parts_.gradients.view(segment.parameter);
  PANNIER_CHECK(gradient.data != nullptr, fmt::format("no gradient for parameter {}", segment.parameter));
  const auto shape = state_shape_of(parts_.format, static_cast<int>(parts_.state_names.size()));
  return {constants,
          {.param = at_element(view.param, segment.offset, shape.param_nbytes),
           .rest = at_element(view.rest, segment.offset, shape.rest_nbytes),
           .state1 = static_cast<float*>(at_element(view.state1, segment.offset, 4)),
           .state2 = static_cast<float*>(at_element(view.state2, segment.offset, 4)),
           .grad = gradient.data,
           .grad_type = gradient.type,
           .numel = segment.numel}};
}

std::optional<UpdatePipeline::Prepared> UpdatePipeline::prepare(int bucket, const Coefficients& coefficients) {
  std::vector<const Segment*> updated;
  for (const Segment& segment : parts_.layout.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (coefficients.at(static_cast<std::size_t>(segment.parameter)) && segment.numel > 0) {
      updated.push_back(&segment);
    }
  }
  if (updated.empty()) {
    return std::nullopt;
  }
  const Way& way = parts_.routes.update_way(bucket);
  Prepared prepared{way.states->lease(bucket), {.bucket = bucket, .tasks = {}, .parameter = {}}};
  const StateView& view = prepared.lease.view();
  for (const Segment* segment : updated) {
    prepared.update.tasks.push_back(
        task_of(*segment, view, *coefficients[static_cast<std::size_t>(segment->parameter)]));
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
  drop_gradients(bucket, coefficients);
  return prepared->update.numel();
}

void UpdatePipeline::drop_gradients(int bucket, const Coefficients& coefficients) {
  for (const Segment& segment : parts_.layout.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (coefficients[static_cast<std::size_t>(segment.parameter)] && segment.numel > 0) {
      parts_.gradients.drop(segment.parameter);
    }
  }
}

// Buckets are in backward order; the next forward needs the last one first.
void UpdatePipeline::update_on_device(const Coefficients& coefficients, const kernels::UpdateControl& control) {
  for (int b = parts_.layout.num_buckets() - 1; b >= 0; --b) {
    if (parts_.routes.route(b) != UpdateRoute::kHost) {
      const auto span = parts_.device.trace().queued(Queue::kCompute, {.what = "update", .index = b});
      update_bucket(b, coefficients, control);
    }
  }
}

std::int64_t UpdatePipeline::update_on_host(const Coefficients& coefficients, float grad_factor) {
  std::int64_t numel = 0;
  const std::uint32_t skip = 0;
  for (int b = parts_.layout.num_buckets() - 1; b >= 0; --b) {
    if (parts_.routes.route(b) == UpdateRoute::kHost) {
      const auto span = parts_.device.trace().host(TraceRow::kHostUpdates, {.what = "update", .index = b});
      numel += update_bucket(b, coefficients, {&grad_factor, &skip});
    }
  }
  return numel;
}

void UpdatePipeline::publish_versions(const Coefficients& coefficients) {
  for (int b = 0; b < parts_.layout.num_buckets(); ++b) {
    parts_.routes.update_way(b).path->finish();
  }
  for (std::size_t i = 0; i < coefficients.size(); ++i) {
    if (coefficients[i]) {
      parts_.parameters.bump_version(static_cast<int>(i));
    }
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
    const Lease lease = way.states->lease(bucket);
    way.path->fetch(bucket, lease.view(), 0, parts_.layout.buckets()[static_cast<std::size_t>(bucket)].numel);
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

at::Tensor UpdatePipeline::read(int parameter, const std::string& name) {
  const c10::NoGradGuard no_grad;
  const Segment& segment = parts_.layout.segment_of(parameter);
  const Lease lease = lease_of(parameter);
  const StateView& view = lease.view();
  const at::Tensor bucket = parts_.parameters.bucket(parts_.layout.bucket_of(parameter));
  at::Tensor flat = at::empty({segment.numel}, at::TensorOptions().dtype(at::kFloat).device(bucket.device()));
  if (name != "fp32_param") {
    rest_way(parameter).path->read_state(flat.data_ptr(), state_address(view, name, segment.offset), flat.nbytes());
  } else if (parts_.format == kernels::StateFormat::kFp32) {
    parts_.device.copy_on_device(flat.data_ptr(), parts_.parameters.address(parameter), flat.nbytes());
  } else if (parts_.format == kernels::StateFormat::kFp16) {
    rest_way(parameter).path->read_state(flat.data_ptr(), at_element<float>(view.rest, segment.offset), flat.nbytes());
  } else {
    at::Tensor lo = at::empty({segment.numel}, at::TensorOptions().dtype(at::kShort).device(bucket.device()));
    rest_way(parameter).path->read_state(lo.data_ptr(), at_element<std::int16_t>(view.rest, segment.offset),
                                         lo.nbytes());
    parts_.device.compute().join_master(static_cast<const std::uint16_t*>(parts_.parameters.address(parameter)),
                                        lo.data_ptr<std::int16_t>(), flat.data_ptr<float>(), segment.numel);
  }
  return parts_.parameters.view_like_parameter(flat, parameter).clone();
}

void UpdatePipeline::write(int parameter, const std::string& name, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const at::Tensor& owner = parts_.parameters.parameter(parameter);
  if (value.sizes() != owner.sizes()) {
    throw ConfigError(fmt::format("{} of parameter {} has shape {}, got {}", name, parts_.parameters.name(parameter),
                                  owner.sizes().vec(), value.sizes().vec()));
  }
  const Segment& segment = parts_.layout.segment_of(parameter);
  at::Tensor flat = at::empty({segment.numel}, at::TensorOptions().dtype(at::kFloat).device(owner.device()));
  parts_.parameters.view_like_parameter(flat, parameter).copy_(value);
  const Lease lease = lease_of(parameter);
  if (name == "fp32_param") {
    set_master(segment, lease.view(), flat.data_ptr<float>());
    parts_.parameters.bump_version(parameter);
  } else {
    rest_way(parameter).path->write_state(state_address(lease.view(), name, segment.offset), flat.data_ptr(),
                                          flat.nbytes());
  }
}

}  // namespace pannier
