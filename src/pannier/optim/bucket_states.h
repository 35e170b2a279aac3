// One bucket's states on this rank, opened to be read and written as fp32 from host memory, whatever their home and
// format: for checkpoints. Master weights are joined and split here, so that what is written is a number that any
// format can be made from.
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
  /// `parts` must outlive it. `access`: kRead where nothing will be written.
  BucketStates(UpdatePipelineParts& parts, int bucket, Access access);
  ~BucketStates();
  BucketStates(const BucketStates&) = delete;
  BucketStates& operator=(const BucketStates&) = delete;

  /// Elements from `begin` on, counted from the parameter's start and within this rank's piece, of a state: kMasterName
  /// or one of the pipeline's state_names().
  void read(int parameter, const std::string& name, std::int64_t begin, std::span<float> values);
  /// The opposite. What the model reads follows, on this rank's piece.
  void write(int parameter, const std::string& name, std::int64_t begin, std::span<const float> values);
  /// What was written rests where it belongs.
  void close();

 private:
  void read_master(const ElementRange& range, std::span<float> values);
  void write_master(const ElementRange& range, std::span<const float> values);
  void read_rest(const ElementRange& range, void* to, std::size_t width);
  void write_rest(const ElementRange& range, const void* from, std::size_t width);
  [[nodiscard]] ElementRange place(int parameter, std::int64_t begin, std::size_t numel) const;
  [[nodiscard]] std::byte* own_address(std::int64_t at) const;
  [[nodiscard]] float* state_address(const StateView& view, const std::string& name, std::int64_t at) const;

  UpdatePipelineParts& parts_;
  int bucket_;
  const UpdateRoutes::Way& way_;
  ChunkCursor states_;
  at::Tensor own_;  ///< This rank's part of the bucket, on the device.
  std::vector<std::uint16_t> high_;
  std::vector<std::int16_t> low_;
  bool is_open_ = true;
};

}  // namespace pannier
