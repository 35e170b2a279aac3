#include "pannier/optim/bucket_states.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/kernels/convert.h"

namespace pannier {
namespace {

// A store on the device takes the parameters there with its lease, so that they are written there too.
std::byte* host_address(UpdatePipelineParts& parts, int bucket) {
  parts.residence.settle(bucket);
  return parts.routes.route(bucket) == UpdateRoute::kDevice ? nullptr : parts.residence.host_address(bucket);
}

}  // namespace

BucketStates::BucketStates(UpdatePipelineParts& parts, int bucket)
    : parts_(parts),
      bucket_(bucket),
      way_(parts.routes.rest_way(bucket)),
      states_(*way_.states, bucket, Access::kUpdate),
      at_rest_(host_address(parts, bucket)),
      own_(at_rest_ == nullptr ? parts.residence.own(bucket) : at::Tensor()) {}

BucketStates::~BucketStates() {
  try {
    close();
  } catch (const std::exception& error) {
    log::warning(fmt::format("bucket {} may rest with old values: {}", bucket_, error.what()));
  }
}

void BucketStates::close() {
  if (!std::exchange(is_open_, false)) {
    return;
  }
  states_.close();
  if (at_rest_ == nullptr) {
    parts_.residence.put_back(bucket_);
  }
}

// Where the elements lie in this rank's shard.
ElementRange BucketStates::place(int parameter, std::int64_t begin, std::size_t numel) const {
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const std::int64_t end = begin + static_cast<std::int64_t>(numel);
  PANNIER_CHECK(is_open_ && parts_.shards.buckets().bucket_of(parameter) == bucket_ &&
                    begin >= piece.parameter_offset && end <= piece.parameter_offset + piece.numel,
                fmt::format("elements {} to {} of parameter {}, whose piece has {} from {} on", begin, end, parameter,
                            piece.numel, piece.parameter_offset));
  const std::int64_t at = piece.shard_offset + begin - piece.parameter_offset;
  return {at, at + static_cast<std::int64_t>(numel)};
}

void BucketStates::write_param(const ElementRange& range, const void* from, std::size_t width) {
  const std::size_t nbytes = nbytes_of(range.numel(), width);
  if (at_rest_ != nullptr) {
    std::memcpy(at_rest_ + nbytes_of(range.begin, width), from, nbytes);
  } else {
    parts_.device.copy_to_device(static_cast<std::byte*>(own_.data_ptr()) + nbytes_of(range.begin, width), from,
                                 nbytes);
  }
}

float* BucketStates::state_address(const StateView& view, const std::string& name, std::int64_t at) const {
  float* const states[] = {view.state1, view.state2};
  for (std::size_t i = 0; i < parts_.state_names.size(); ++i) {
    if (parts_.state_names[i] == name) {
      return states[i] + at - view.range.begin;
    }
  }
  throw InternalError(fmt::format("no state is called '{}'", name));
}

void BucketStates::write(int parameter, const std::string& name, std::int64_t begin, std::span<const float> values) {
  const ElementRange range = place(parameter, begin, values.size());
  if (name == kMasterName) {
    write_master(range, values);
    states_.visit(range, [&](const StateView& view, const ElementRange& part) {
      way_.path->fetch(bucket_, view, part);  // Where the home has a copy of the parameter, it follows.
    });
    return;
  }
  states_.visit(range, [&](const StateView& view, const ElementRange& part) {
    way_.path->state_from_host(state_address(view, name, part.begin), values.data() + (part.begin - range.begin),
                               nbytes_of(part.numel(), sizeof(float)));
  });
}

// `width`: bytes of an element of the rest.
void BucketStates::write_rest(const ElementRange& range, const void* from, std::size_t width) {
  states_.visit(range, [&](const StateView& view, const ElementRange& part) {
    way_.path->state_from_host(static_cast<std::byte*>(view.rest) + nbytes_of(part.begin - view.range.begin, width),
                               static_cast<const std::byte*>(from) + nbytes_of(part.begin - range.begin, width),
                               nbytes_of(part.numel(), width));
  });
}

void BucketStates::write_master(const ElementRange& range, std::span<const float> values) {
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      write_param(range, values.data(), sizeof(float));
      break;
    case kernels::StateFormat::kFp16:
      high_.resize(values.size());
      kernels::to_fp16(values.data(), high_.data(), range.numel(), torch_parallel_for());
      write_param(range, high_.data(), sizeof(std::uint16_t));
      write_rest(range, values.data(), sizeof(float));
      break;
    case kernels::StateFormat::kBf16:
      high_.resize(values.size());
      low_.resize(values.size());
      kernels::split_master(values.data(), high_.data(), low_.data(), range.numel(), torch_parallel_for());
      write_param(range, high_.data(), sizeof(std::uint16_t));
      write_rest(range, low_.data(), sizeof(std::int16_t));
      break;
  }
}

}  // namespace pannier
