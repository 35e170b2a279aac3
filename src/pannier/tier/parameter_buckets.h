// The parameters as the model sees them, stored flat: one tensor a bucket, into which every parameter of the model
// points. A parameter keeps its shape, its strides and its own storage object (so that saving or sharing one saves
// one), but its bytes are the bucket's, so that an update or a transfer of the bucket is one run over memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/layout/bucket_layout.h"

namespace pannier {

/// Owns the flat parameter buckets. One thread.
class ParameterBuckets {
 public:
  /// Nothing is allocated or moved yet. `parameters[i]` is parameter i of the layout. `dtype` is what they become, but
  /// for the last ones, which become `last_dtypes`; those of a bucket are of one type.
  /// Throws ConfigError naming a parameter whose memory overlaps itself (an expanded one).
  ParameterBuckets(Device& device, const BucketLayout& layout, std::vector<at::Tensor> parameters,
                   std::vector<std::string> names, at::ScalarType dtype,
                   const std::vector<at::ScalarType>& last_dtypes = {});

  /// Where fill() finds the elements of a parameter that has no memory of its own: flat, in the order of its memory,
  /// maybe with others after them; an undefined tensor: where it is.
  void come_from(std::function<at::Tensor(int)> source) { source_ = std::move(source); }
  /// Allocates a bucket, and makes it hold its parameters, which from now on point into it. Before a parameter's old
  /// memory is let go, `keep(segment, values)` sees its values, flat in storage order and as given (so that an fp32
  /// master can be made from them), where they were. Throws torch's out-of-memory error before anything was moved.
  template <class Keep>
  void fill(int bucket, Keep&& keep) {
    allocate(bucket);
    for (const Segment& segment : layout_.buckets()[static_cast<std::size_t>(bucket)].segments) {
      keep(segment, flat_values(segment.parameter));
      point_into_bucket(segment.parameter);
    }
  }

  /// Takes a bucket's memory away from its parameters and from all views of them, which must not be read until
  /// give_memory(). Their storages stay.
  void take_memory(int bucket);
  /// Gives them memory that holds their values: a flat tensor of the bucket's size.
  void give_memory(int bucket, const at::Tensor& flat);
  /// Whether a bucket has memory.
  [[nodiscard]] bool has_memory(int bucket) const { return buckets_.at(static_cast<std::size_t>(bucket)).defined(); }
  /// Gives a bucket's parameters other storages over the same memory, so that views which somebody takes from now on
  /// are told from those that a graph has saved. Returns what they had, for return_storages().
  [[nodiscard]] std::vector<c10::Storage> lend_storages(int bucket);
  /// Gives them back. Views of the lent ones that somebody kept throw on access from now on.
  void return_storages(int bucket, const std::vector<c10::Storage>& own);
  /// After take_memory(), while the parameters themselves are released: views that somebody kept throw on access, for
  /// good.
  void refuse_aliases(int bucket);
  /// A new tensor for a bucket, zero, with the padding that whole-bucket transfers read.
  [[nodiscard]] at::Tensor new_flat(int bucket);

  [[nodiscard]] at::Tensor bucket(int index) const { return buckets_.at(static_cast<std::size_t>(index)); }
  [[nodiscard]] const at::Tensor& parameter(int index) const { return parameters_.at(static_cast<std::size_t>(index)); }
  [[nodiscard]] const std::string& name(int index) const { return names_.at(static_cast<std::size_t>(index)); }
  [[nodiscard]] int num_parameters() const noexcept { return static_cast<int>(parameters_.size()); }
  [[nodiscard]] at::ScalarType dtype(int bucket) const { return dtypes_.at(static_cast<std::size_t>(bucket)); }
  /// Address of a parameter's first element in its bucket.
  [[nodiscard]] void* address(int parameter) const;

  /// The storage that a parameter has as the engine left it: its view of its bucket.
  [[nodiscard]] const c10::Storage& storage(int parameter) const {
    return storages_.at(static_cast<std::size_t>(parameter));
  }
  /// Whether something else refers to a parameter's memory: a detached tensor, a state dict, a graph that is kept. May
  /// give the parameter a new storage object over the same memory, which tells the others from what is only left over.
  [[nodiscard]] bool has_aliases(int parameter);
  /// Whether a parameter has the type, shape and strides with which it was pointed into its bucket.
  [[nodiscard]] bool has_bucket_form(int parameter) const;
  /// Points a parameter, whatever became of it, into its bucket as it was.
  void point_again(int parameter);

  /// `flat`, a tensor laid out as the parameter's bucket (gradients, say), seen with the parameter's shape and strides.
  [[nodiscard]] at::Tensor view_like_parameter(const at::Tensor& flat_segment, int parameter) const;

  /// Whether a tensor of the parameter's shape has its elements in memory in the parameter's order, without gaps.
  [[nodiscard]] bool is_packed(const at::Tensor& tensor, int parameter) const;

  /// Tells autograd that a parameter's values have changed.
  void bump_version(int parameter);
  /// Parameters whose values somebody else has changed since fill(), bump_version() or the last call: torch's in-place
  /// operations (by version counter) and, with `take_replaced`, replaced data of the same type and shape, which is
  /// copied into the bucket. Throws ConfigError naming a parameter whose type, shape or device was changed, or whose
  /// data was replaced while its old memory, which is the bucket's, is still somebody's; nothing is taken then.
  /// Those of buckets without memory are left out.
  [[nodiscard]] std::vector<int> take_edits(bool take_replaced);
  /// The same for one bucket that has memory.
  [[nodiscard]] std::vector<int> take_edits_of(int bucket);

 private:
  void allocate(int bucket);
  [[nodiscard]] at::Tensor flat_values(int parameter) const;
  void point_into_bucket(int parameter);
  [[nodiscard]] at::ScalarType dtype_of(int parameter) const { return dtype(layout_.bucket_of(parameter)); }
  void require_same_kind(int parameter) const;
  [[nodiscard]] bool is_replaced(int parameter) const;
  void refuse(const c10::Storage& storage, int parameter) const;
  [[nodiscard]] std::vector<int> take_edits(const std::vector<int>& parameters, bool take_replaced);

  Device& device_;
  const BucketLayout& layout_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<at::ScalarType> dtypes_;  ///< By bucket.
  std::vector<std::vector<std::int64_t>> strides_;
  std::vector<std::vector<std::int64_t>> sizes_;  ///< Of the parameters, as they were pointed into their buckets.
  std::vector<at::Tensor> buckets_;
  std::vector<std::int64_t> versions_;
  std::vector<c10::Storage> storages_;  ///< Each parameter's view of its bucket.
  std::function<at::Tensor(int)> source_;
  std::vector<std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>> aliases_;  ///< Earlier ones that others kept.
};

}  // namespace pannier
