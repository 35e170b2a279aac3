#include "pannier/tier/released_parameters.h"

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <utility>

#include "pannier/base/error.h"
#include "pannier/tier/refusing_storage.h"

namespace pannier {

ReleasedParameters::ReleasedParameters(const BucketLayout& layout, ParameterBuckets& parameters, Messages messages)
    : layout_(layout),
      parameters_(parameters),
      messages_(std::move(messages)),
      away_(static_cast<std::size_t>(layout.num_buckets())),
      refusing_(static_cast<std::size_t>(layout.num_parameters())) {}

int ReleasedParameters::aliased(int bucket) const {
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (segment.numel > 0 && parameters_.has_aliases(segment.parameter)) {
      return segment.parameter;
    }
  }
  return -1;
}

const c10::Storage& ReleasedParameters::refusing_storage(int parameter) {
  c10::Storage& storage = refusing_[static_cast<std::size_t>(parameter)];
  if (!storage) {
    const c10::Storage& real = parameters_.storage(parameter);
    storage =
        make_refusing_storage(real.nbytes(), real.device(),
                              fmt::format("parameter {} was read {}", parameters_.name(parameter), messages_.read));
  }
  return storage;
}

void ReleasedParameters::release(int bucket) {
  PANNIER_CHECK(!is_released(bucket), fmt::format("bucket {} was released twice", bucket));
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (segment.numel > 0) {
      (void)refusing_storage(segment.parameter);  // What can throw comes first.
    }
  }
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (segment.numel > 0) {
      c10::TensorImpl* impl = parameters_.parameter(segment.parameter).unsafeGetTensorImpl();
      impl->set_allow_tensor_metadata_change(true);  // A leaf that was made by detach() does not allow it.
      impl->set_storage_keep_dtype(refusing_storage(segment.parameter));
    }
  }
  away_[static_cast<std::size_t>(bucket)] = true;
}

void ReleasedParameters::restore(int bucket) {
  if (!is_released(bucket)) {
    return;
  }
  away_[static_cast<std::size_t>(bucket)] = false;
  int replaced = -1;
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    if (segment.numel == 0) {
      continue;
    }
    const at::Tensor& parameter = parameters_.parameter(segment.parameter);
    if (parameters_.has_bucket_form(segment.parameter) &&
        parameter.storage().unsafeGetStorageImpl() == refusing_storage(segment.parameter).unsafeGetStorageImpl()) {
      parameter.unsafeGetTensorImpl()->set_storage_keep_dtype(parameters_.storage(segment.parameter));
    } else {
      parameters_.point_again(segment.parameter);
      replaced = segment.parameter;
    }
  }
  if (replaced >= 0) {
    throw ConfigError(
        fmt::format("the data of parameter {} was replaced {}", parameters_.name(replaced), messages_.replaced));
  }
}

}  // namespace pannier
