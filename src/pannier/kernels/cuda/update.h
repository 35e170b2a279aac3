// The update on a GPU: kernels/update.h's arithmetic, bit for bit, for a whole bucket in one launch. The runs lie in
// device memory as an array of UpdateRun. What depends on the gradients of this very step, the factor and whether to
// update at all, is read from device memory, so that the host launches without waiting for the norm. Calls return at
// once; the work is done in the stream's order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pannier/kernels/cuda/stream.h"
#include "pannier/kernels/update.h"

namespace pannier::kernels::cuda {

/// One run as the kernel reads it: an UpdateTask whose pointers are to device memory.
struct UpdateRun {
  UpdateTask task;
  std::int64_t first_block = 0;  ///< Blocks of kBlockNumel elements in the runs before it.
};

/// The runs of one launch, checked and numbered. The caller copies `runs` to device memory.
struct UpdateBatch {
  Algorithm algorithm = Algorithm::kAdamW;
  StateFormat format = StateFormat::kFp32;
  GradType grad_type = GradType::kFp32;
  bool has_state1 = true;  ///< False for SGD without momentum.
  std::int64_t num_blocks = 0;
  std::vector<UpdateRun> runs;  ///< Without the empty ones.
};

/// Checks the tasks and numbers their blocks. Throws InternalError as kernels::update does, and where tasks differ in
/// gradient type or in whether they have states.
[[nodiscard]] UpdateBatch make_update_batch(Algorithm algorithm, StateFormat format, std::span<const UpdateTask> tasks);

/// Updates all runs of `batch`, whose array has been copied to `device_runs`.
void update(const UpdateBatch& batch, const UpdateRun* device_runs, const UpdateControl& control, Stream stream);

namespace detail {

/// What every update kernel is called with.
struct UpdateArguments {
  const UpdateRun* runs;
  int num_runs;
  UpdateControl control;
};

// One function a rule, each in a file of its own.
void launch_adamw(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream);
void launch_adam(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream);
void launch_sgd(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream);
void launch_adagrad(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream);
void launch_lion(const UpdateBatch& batch, const UpdateArguments& arguments, Stream stream);

}  // namespace detail
}  // namespace pannier::kernels::cuda
