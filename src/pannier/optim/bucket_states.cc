#include "pannier/optim/bucket_states.h"

#include <fmt/format.h>

#include <exception>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/kernels/convert.h"

namespace pannier {

BucketStates::BucketStates(UpdatePipelineParts& parts, int bucket, Access access)
    : parts_(parts),
      bucket_(bucket),
      way_(parts.routes.rest_way(bucket)),
      states_((parts.residence.settle(bucket), *way_.states), bucket, access),
      own_(parts.residence.own(bucket)) {}

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
  parts_.residence.put_back(bucket_);
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

std::byte* BucketStates::own_address(std::int64_t at) const {
  return static_cast<std::byte*>(own_.data_ptr()) + nbytes_of(at, own_.element_size());
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

void BucketStates::read(int parameter, const std::string& name, std::int64_t begin, std::span<float> values) {
  const ElementRange range = place(parameter, begin, values.size());
  if (name == kMasterName) {
    read_master(range, values);
    return;
  }
  states_.visit(range, [&](const StateView& view, const ElementRange& part) {
    way_.path->state_to_host(values.data() + (part.begin - range.begin), state_address(view, name, part.begin),
                             nbytes_of(part.numel(), sizeof(float)));
  });
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
void BucketStates::read_rest(const ElementRange& range, void* to, std::size_t width) {
  states_.visit(range, [&](const StateView& view, const ElementRange& part) {
    way_.path->state_to_host(static_cast<std::byte*>(to) + nbytes_of(part.begin - range.begin, width),
                             static_cast<std::byte*>(view.rest) + nbytes_of(part.begin - view.range.begin, width),
                             nbytes_of(part.numel(), width));
  });
}

void BucketStates::write_rest(const ElementRange& range, const void* from, std::size_t width) {
  states_.visit(range, [&](const StateView& view, const ElementRange& part) {
    way_.path->state_from_host(static_cast<std::byte*>(view.rest) + nbytes_of(part.begin - view.range.begin, width),
                               static_cast<const std::byte*>(from) + nbytes_of(part.begin - range.begin, width),
                               nbytes_of(part.numel(), width));
  });
}

void BucketStates::read_master(const ElementRange& range, std::span<float> values) {
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_to_host(values.data(), own_address(range.begin), values.size_bytes());
      break;
    case kernels::StateFormat::kFp16:
      read_rest(range, values.data(), sizeof(float));
      break;
    case kernels::StateFormat::kBf16:
      high_.resize(values.size());
      low_.resize(values.size());
      parts_.device.copy_to_host(high_.data(), own_address(range.begin), values.size_bytes() / 2);
      read_rest(range, low_.data(), sizeof(std::int16_t));
      kernels::join_master(high_.data(), low_.data(), values.data(), range.numel(), torch_parallel_for());
      break;
  }
}

void BucketStates::write_master(const ElementRange& range, std::span<const float> values) {
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_to_device(own_address(range.begin), values.data(), values.size_bytes());
      break;
    case kernels::StateFormat::kFp16:
      high_.resize(values.size());
      kernels::to_fp16(values.data(), high_.data(), range.numel(), torch_parallel_for());
      parts_.device.copy_to_device(own_address(range.begin), high_.data(), values.size_bytes() / 2);
      write_rest(range, values.data(), sizeof(float));
      break;
    case kernels::StateFormat::kBf16:
      high_.resize(values.size());
      low_.resize(values.size());
      kernels::split_master(values.data(), high_.data(), low_.data(), range.numel(), torch_parallel_for());
      parts_.device.copy_to_device(own_address(range.begin), high_.data(), values.size_bytes() / 2);
      write_rest(range, low_.data(), sizeof(std::int16_t));
      break;
  }
}

}  // namespace pannier
