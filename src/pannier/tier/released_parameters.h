// Parameters whose bytes are being written while the user's code runs on. Such a parameter is released: it keeps its
// shape, its version and its place in the model, but its storage is one that throws a message of ours on any access, so
// that nobody ever reads an old or a half-written value. When the bytes are there, the real storage comes back.
//
// What the user has made of the parameter before (p.detach(), a state dict, an average) has the real storage and would
// not throw; who releases asks for such aliases first.
#pragma once

#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "pannier/layout/bucket_layout.h"
#include "pannier/tier/parameter_buckets.h"

namespace pannier {

/// Takes the storages of buckets' parameters away and puts them back. Of the engine's thread alone: between release and
/// restore nobody else may look at the parameters.
class ReleasedParameters {
 public:
  /// What people are told: of who reads a released one, and of who replaces its data.
  struct Messages {
    std::string read;
    std::string replaced;
  };
  /// `layout` and `parameters` must outlive it.
  ReleasedParameters(const BucketLayout& layout, ParameterBuckets& parameters, Messages messages);

  /// A parameter of the bucket to whose memory something else than the parameter refers; -1: none.
  [[nodiscard]] int aliased(int bucket) const;
  void release(int bucket);
  /// Puts the storages back. Throws ConfigError, when all are back, naming a parameter whose data somebody replaced in
  /// the meantime: it then has the bucket's values, not the new ones.
  void restore(int bucket);
  [[nodiscard]] bool is_released(int bucket) const { return away_.at(static_cast<std::size_t>(bucket)); }

 private:
  [[nodiscard]] const c10::Storage& refusing_storage(int parameter);

  const BucketLayout& layout_;
  ParameterBuckets& parameters_;
  Messages messages_;
  std::vector<bool> away_;              ///< By bucket.
  std::vector<c10::Storage> refusing_;  ///< By parameter: throws on access. Made when first needed, then kept.
};

}  // namespace pannier
