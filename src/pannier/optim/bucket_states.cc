#include "pannier/optim/bucket_states.h"

#include <fmt/format.h>

#include <exception>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/base/units.h"
#include "pannier/kernels/convert.h"

namespace pannier {

BucketStates::BucketStates(UpdatePipelineParts& parts, int bucket)
    : parts_(parts),
      bucket_(bucket),
      way_(parts.routes.rest_way(bucket)),
      lease_((parts.residence.settle(bucket), way_.states->lease(bucket))),
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
  if (was_written_) {
    way_.path->fetch(bucket_, lease_.view(), 0, own_.numel());
  }
  parts_.residence.put_back(bucket_);
}

// Where the elements lie in this rank's shard.
std::int64_t BucketStates::place(int parameter, std::int64_t begin, std::size_t numel) const {
  const ShardPiece& piece = parts_.shards.piece_of(parameter);
  const std::int64_t end = begin + static_cast<std::int64_t>(numel);
  PANNIER_CHECK(is_open_ && parts_.shards.buckets().bucket_of(parameter) == bucket_ &&
                    begin >= piece.parameter_offset && end <= piece.parameter_offset + piece.numel,
                fmt::format("elements {} to {} of parameter {}, whose piece has {} from {} on", begin, end, parameter,
                            piece.numel, piece.parameter_offset));
  return piece.shard_offset + begin - piece.parameter_offset;
}

std::byte* BucketStates::own_address(std::int64_t at) const {
  return static_cast<std::byte*>(own_.data_ptr()) + nbytes_of(at, own_.element_size());
}

float* BucketStates::state_address(const std::string& name, std::int64_t at) const {
  const float* const states[] = {lease_.view().state1, lease_.view().state2};
  for (std::size_t i = 0; i < parts_.state_names.size(); ++i) {
    if (parts_.state_names[i] == name) {
      return const_cast<float*>(states[i]) + at;
    }
  }
  throw InternalError(fmt::format("no state is called '{}'", name));
}

void BucketStates::read(int parameter, const std::string& name, std::int64_t begin, std::span<float> values) {
  const std::int64_t at = place(parameter, begin, values.size());
  if (name == kMasterName) {
    read_master(at, values);
  } else {
    way_.path->state_to_host(values.data(), state_address(name, at), values.size_bytes());
  }
}

void BucketStates::write(int parameter, const std::string& name, std::int64_t begin, std::span<const float> values) {
  const std::int64_t at = place(parameter, begin, values.size());
  if (name == kMasterName) {
    was_written_ = true;
    write_master(at, values);
  } else {
    way_.path->state_from_host(state_address(name, at), values.data(), values.size_bytes());
  }
}

void BucketStates::read_master(std::int64_t at, std::span<float> values) {
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_to_host(values.data(), own_address(at), values.size_bytes());
      break;
    case kernels::StateFormat::kFp16:
      way_.path->state_to_host(values.data(), static_cast<float*>(lease_.view().rest) + at, values.size_bytes());
      break;
    case kernels::StateFormat::kBf16:
      high_.resize(values.size());
      low_.resize(values.size());
      parts_.device.copy_to_host(high_.data(), own_address(at), values.size_bytes() / 2);
      way_.path->state_to_host(low_.data(), static_cast<std::int16_t*>(lease_.view().rest) + at,
                               values.size_bytes() / 2);
      kernels::join_master(high_.data(), low_.data(), values.data(), static_cast<std::int64_t>(values.size()),
                           torch_parallel_for());
      break;
  }
}

void BucketStates::write_master(std::int64_t at, std::span<const float> values) {
  const auto numel = static_cast<std::int64_t>(values.size());
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      parts_.device.copy_to_device(own_address(at), values.data(), values.size_bytes());
      break;
    case kernels::StateFormat::kFp16:
      high_.resize(values.size());
      kernels::to_fp16(values.data(), high_.data(), numel, torch_parallel_for());
      parts_.device.copy_to_device(own_address(at), high_.data(), values.size_bytes() / 2);
      way_.path->state_from_host(static_cast<float*>(lease_.view().rest) + at, values.data(), values.size_bytes());
      break;
    case kernels::StateFormat::kBf16:
      high_.resize(values.size());
      low_.resize(values.size());
      kernels::split_master(values.data(), high_.data(), low_.data(), numel, torch_parallel_for());
      parts_.device.copy_to_device(own_address(at), high_.data(), values.size_bytes() / 2);
      way_.path->state_from_host(static_cast<std::int16_t*>(lease_.view().rest) + at, low_.data(),
                                 values.size_bytes() / 2);
      break;
  }
}

}  // namespace pannier
