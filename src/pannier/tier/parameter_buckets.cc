#include "pannier/tier/parameter_buckets.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier {
namespace {

// Keeps the parameter's own order of elements in memory where it is dense; else rows follow one another.
std::vector<std::int64_t> packed_strides(const at::Tensor& parameter, const std::string& name) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  for (std::int64_t d = 0; d < parameter.dim(); ++d) {
    if (parameter.stride(d) == 0 && parameter.size(d) > 1) {
      throw ConfigError(
          fmt::format("parameter {} has shape {} and strides {}: its elements share memory, so it can't be trained; "
                      "give it memory of its own with .clone()",
                      name, parameter.sizes().vec(), parameter.strides().vec()));
    }
  }
  return at::empty(parameter.sizes(), at::TensorOptions().device(at::kMeta)).strides().vec();
}

}  // namespace

ParameterBuckets::ParameterBuckets(Device& device, const BucketLayout& layout, std::vector<at::Tensor> parameters,
                                   std::vector<std::string> names, at::ScalarType dtype,
                                   const std::vector<at::ScalarType>& last_dtypes)
    : device_(device),
      layout_(layout),
      parameters_(std::move(parameters)),
      names_(std::move(names)),
      dtypes_(static_cast<std::size_t>(layout.num_buckets()), dtype) {
  PANNIER_CHECK(parameters_.size() == static_cast<std::size_t>(layout.num_parameters()),
                fmt::format("{} parameters in a layout of {}", parameters_.size(), layout.num_parameters()));
  const std::size_t first_of_last = parameters_.size() - last_dtypes.size();
  for (std::size_t i = 0; i < last_dtypes.size(); ++i) {
    dtypes_[static_cast<std::size_t>(layout.bucket_of(static_cast<int>(first_of_last + i)))] = last_dtypes[i];
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    strides_.push_back(packed_strides(parameters_[i], names_[i]));
  }
  buckets_.resize(static_cast<std::size_t>(layout.num_buckets()));
  sizes_.resize(parameters_.size());
  versions_.resize(parameters_.size());
  storages_.resize(parameters_.size());
  aliases_.resize(parameters_.size());
}

void ParameterBuckets::allocate(int bucket) { buckets_[static_cast<std::size_t>(bucket)] = new_flat(bucket); }

at::Tensor ParameterBuckets::new_flat(int bucket) {
  at::Tensor flat =
      device_.allocate(layout_.buckets()[static_cast<std::size_t>(bucket)].numel, dtype(bucket), Owner::kParameters);
  // Padding is read by whole-bucket transfers; it must not be garbage.
  device_.fill_zero(flat.data_ptr(), flat.nbytes());
  return flat;
}

void ParameterBuckets::take_memory(int bucket) {
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    const c10::Storage& storage = storages_[static_cast<std::size_t>(segment.parameter)];
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  }
  buckets_[static_cast<std::size_t>(bucket)] = at::Tensor();
}

std::vector<c10::Storage> ParameterBuckets::lend_storages(int bucket) {
  std::vector<c10::Storage> own;
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    own.push_back(storages_[static_cast<std::size_t>(segment.parameter)]);
    point_again(segment.parameter);
  }
  return own;
}

void ParameterBuckets::return_storages(int bucket, const std::vector<c10::Storage>& own) {
  std::size_t next = 0;
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    c10::Storage& storage = storages_[static_cast<std::size_t>(segment.parameter)];
    const c10::Storage lent = std::exchange(storage, own[next++]);
    c10::TensorImpl* impl = parameters_[static_cast<std::size_t>(segment.parameter)].unsafeGetTensorImpl();
    impl->set_allow_tensor_metadata_change(true);
    impl->set_storage_keep_dtype(storage);
    refuse(lent, segment.parameter);
  }
}

void ParameterBuckets::refuse_aliases(int bucket) {
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    c10::Storage& storage = storages_[static_cast<std::size_t>(segment.parameter)];
    if (storage.use_count() > 1) {
      const c10::Storage kept = storage;
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), kept.nbytes(), at::DataPtr(nullptr, kept.device()), nullptr, false));
      refuse(kept, segment.parameter);
    }
  }
}

void ParameterBuckets::refuse(const c10::Storage& storage, int parameter) const {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(fmt::format(
      "a view of parameter {} (a detached tensor, say, or a graph that was kept) was read after the parameter had been "
      "partitioned again (zero_optimization.stage 3); where it is whole, take copies of it (.clone())",
      name(parameter)));
}

void ParameterBuckets::give_memory(int bucket, const at::Tensor& flat) {
  buckets_[static_cast<std::size_t>(bucket)] = flat;
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    const c10::Storage& storage = storages_[static_cast<std::size_t>(segment.parameter)];
    // As in point_again(): who looks at a parameter keeps the bucket alive.
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(
        address(segment.parameter), new at::Tensor(flat), [](void* kept) { delete static_cast<at::Tensor*>(kept); },
        storage.device()));
  }
}

at::Tensor ParameterBuckets::flat_values(int parameter) const {
  const c10::NoGradGuard no_grad;
  const auto& source = parameters_[static_cast<std::size_t>(parameter)];
  const auto& strides = strides_[static_cast<std::size_t>(parameter)];
  if (const at::Tensor values = source_ ? source_(parameter) : at::Tensor(); values.defined()) {
    return values.narrow(0, 0, source.numel());
  }
  if (source.is_non_overlapping_and_dense()) {
    return source.detach().as_strided({source.numel()}, {1});
  }
  at::Tensor packed = at::empty({source.numel()}, source.options());
  packed.as_strided(source.sizes(), strides).copy_(source.detach());
  return packed;
}

void* ParameterBuckets::address(int parameter) const {
  const auto& flat = buckets_.at(static_cast<std::size_t>(layout_.bucket_of(parameter)));
  return static_cast<char*>(flat.data_ptr()) + nbytes_of(layout_.segment_of(parameter).offset, flat.element_size());
}

void ParameterBuckets::point_into_bucket(int parameter) {
  sizes_[static_cast<std::size_t>(parameter)] = parameters_[static_cast<std::size_t>(parameter)].sizes().vec();
  point_again(parameter);
}

void ParameterBuckets::point_again(int parameter) {
  const c10::NoGradGuard no_grad;
  auto& tensor = parameters_[static_cast<std::size_t>(parameter)];
  const at::Tensor flat = buckets_[static_cast<std::size_t>(layout_.bucket_of(parameter))];
  // The deleter's copy of `flat` keeps the bucket alive for as long as anybody looks at the parameter.
  const at::Tensor view = at::from_blob(
      address(parameter), sizes_[static_cast<std::size_t>(parameter)], strides_[static_cast<std::size_t>(parameter)],
      [flat](void*) {}, flat.options());
  tensor.set_data(view);
  storages_[static_cast<std::size_t>(parameter)] = tensor.storage();
  versions_[static_cast<std::size_t>(parameter)] = tensor._version();
}

// A storage that Python has once looked at counts Python's object for it too, for as long as anything else refers to
// it. Without the parameter's own references such a storage goes, and one that stays is somebody's.
bool ParameterBuckets::has_aliases(int parameter) {
  const auto index = static_cast<std::size_t>(parameter);
  auto& aliases = aliases_[index];
  if (storages_[index].use_count() > 2) {  // The parameter's and ours.
    aliases.push_back(storages_[index].getWeakStorageImpl());
    point_again(parameter);
  }
  std::erase_if(aliases, [](const auto& alias) { return alias.expired(); });
  return !aliases.empty();
}

bool ParameterBuckets::has_bucket_form(int parameter) const {
  const at::Tensor& tensor = parameters_[static_cast<std::size_t>(parameter)];
  return tensor.scalar_type() == dtype_of(parameter) && tensor.device() == device_.torch_device() &&
         tensor.storage_offset() == 0 && tensor.sizes() == sizes_[static_cast<std::size_t>(parameter)] &&
         is_packed(tensor, parameter);
}

at::Tensor ParameterBuckets::view_like_parameter(const at::Tensor& flat_segment, int parameter) const {
  const auto& tensor = parameters_[static_cast<std::size_t>(parameter)];
  return flat_segment.as_strided(tensor.sizes(), strides_[static_cast<std::size_t>(parameter)]);
}

bool ParameterBuckets::is_packed(const at::Tensor& tensor, int parameter) const {
  const auto& strides = strides_[static_cast<std::size_t>(parameter)];
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[static_cast<std::size_t>(d)]) {
      return false;
    }
  }
  return tensor.sizes() == parameters_[static_cast<std::size_t>(parameter)].sizes();
}

void ParameterBuckets::bump_version(int parameter) {
  auto& tensor = parameters_[static_cast<std::size_t>(parameter)];
  tensor.unsafeGetTensorImpl()->bump_version();
  versions_[static_cast<std::size_t>(parameter)] = tensor._version();
}

void ParameterBuckets::require_same_kind(int parameter) const {
  const at::Tensor& tensor = parameters_[static_cast<std::size_t>(parameter)];
  const std::string& name = names_[static_cast<std::size_t>(parameter)];
  const auto& sizes = sizes_[static_cast<std::size_t>(parameter)];
  if (tensor.scalar_type() != dtype_of(parameter) || tensor.device() != device_.torch_device() ||
      tensor.sizes() != sizes) {
    throw ConfigError(
        fmt::format("parameter {} was changed behind the engine: it is now {} of shape {} on {}, the engine holds {} "
                    "of shape {} on "
                    "{}; change the model before initialize",
                    name, c10::toString(tensor.scalar_type()), tensor.sizes().vec(), tensor.device().str(),
                    c10::toString(dtype_of(parameter)), sizes, device_.torch_device().str()));
  }
  const auto& storage = storages_[static_cast<std::size_t>(parameter)];
  const auto& aliases = aliases_[static_cast<std::size_t>(parameter)];
  const std::size_t expected_references = tensor.storage().is_alias_of(storage) ? 2 : 1;
  const bool is_kept = std::any_of(aliases.begin(), aliases.end(), [](const auto& alias) { return !alias.expired(); });
  if (is_replaced(parameter) && storage && (is_kept || storage.use_count() > expected_references)) {
    throw ConfigError(fmt::format(
        "the data of parameter {} was replaced while something else still refers to the memory that it had, "
        "which the engine would overwrite; keep copies (.clone()), or use copy_() to set values",
        name));
  }
}

bool ParameterBuckets::is_replaced(int parameter) const {
  const at::Tensor& tensor = parameters_[static_cast<std::size_t>(parameter)];
  return tensor.numel() > 0 && (tensor.data_ptr() != address(parameter) || !is_packed(tensor, parameter));
}

std::vector<int> ParameterBuckets::take_edits(bool take_replaced) {
  std::vector<int> present;
  for (int i = 0; i < num_parameters(); ++i) {
    if (has_memory(layout_.bucket_of(i))) {
      present.push_back(i);
    }
  }
  return take_edits(present, take_replaced);
}

std::vector<int> ParameterBuckets::take_edits_of(int bucket) {
  std::vector<int> parameters;
  for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
    parameters.push_back(segment.parameter);
  }
  return take_edits(parameters, /*take_replaced=*/true);
}

std::vector<int> ParameterBuckets::take_edits(const std::vector<int>& parameters, bool take_replaced) {
  const c10::NoGradGuard no_grad;
  std::vector<int> edited;
  std::vector<std::pair<int, at::Tensor>> replaced;
  for (const int i : parameters) {
    const at::Tensor& tensor = parameters_[static_cast<std::size_t>(i)];
    const bool is_new = is_replaced(i);
    if (is_new && !take_replaced) {
      continue;
    }
    require_same_kind(i);
    if (is_new) {
      replaced.emplace_back(i, tensor.detach().clone());
    }
    if (is_new || tensor._version() != versions_[static_cast<std::size_t>(i)]) {
      edited.push_back(i);
    }
  }
  // Only now, when nothing can be refused any more, anything is written.
  for (const auto& [parameter, values] : replaced) {
    const Segment& segment = layout_.segment_of(parameter);
    const at::Tensor flat = buckets_[static_cast<std::size_t>(layout_.bucket_of(parameter))];
    view_like_parameter(flat.narrow(0, segment.offset, segment.numel), parameter).copy_(values);
    point_into_bucket(parameter);
  }
  for (const int parameter : edited) {
    versions_[static_cast<std::size_t>(parameter)] = parameters_[static_cast<std::size_t>(parameter)]._version();
  }
  return edited;
}

}  // namespace pannier
