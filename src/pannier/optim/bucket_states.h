// One bucket's states on this rank, opened to be written as fp32 from host memory, whatever their home and format: for
// checkpoints. Master weights are split here, into what the format keeps of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "pannier/optim/update_pipeline.h"

namespace pannier {

/// The name of the master weights among the states.
inline constexpr const char* kMasterName = "fp32_param";

/// Open until destruction, or close(). One bucket at a time, of the engine's thread, while nothing else works on it.
class BucketStates {
 public:
  /// `parts` must outlive it.
  BucketStates(UpdatePipelineParts& parts, int bucket);
  ~BucketStates();
  BucketStates(const BucketStates&) = delete;
  BucketStates& operator=(const BucketStates&) = delete;

  /// Elements from `begin` on, counted from the parameter's start and within this rank's piece, of a state: kMasterName
  /// or one of the pipeline's state_names(). What the model reads follows, on this rank's piece.
  void write(int parameter, const std::string& name, std::int64_t begin, std::span<const float> values);
  /// What was written rests where it belongs.
  void close();

 private:
  void write_master(const ElementRange& range, std::span<const float> values);
  void write_rest(const ElementRange& range, const void* from, std::size_t width);
  [[nodiscard]] ElementRange place(int parameter, std::int64_t begin, std::size_t numel) const;
  void write_param(const ElementRange& range, const void* from, std::size_t width);
  [[nodiscard]] float* state_address(const StateView& view, const std::string& name, std::int64_t at) const;

  UpdatePipelineParts& parts_;
  int bucket_;
  const UpdateRoutes::Way& way_;
  ChunkCursor states_;
  std::byte* at_rest_;  ///< This rank's part of the bucket, if it rests in host memory; null: own_.
  at::Tensor own_;      ///< The same on the device.
  std::vector<std::uint16_t> high_;
  std::vector<std::int16_t> low_;
  bool is_open_ = true;
};

}  // namespace pannier
