#include "pannier/kernels/cuda/update.h"

#include <string>

#include "pannier/base/error.h"
#include "pannier/layout/bucket_layout.h"

namespace pannier::kernels::cuda {
namespace {

void check_task(const UpdateBatch& batch, const UpdateBuffers& b) {
  const bool is_adam = batch.algorithm == Algorithm::kAdamW || batch.algorithm == Algorithm::kAdam;
  PANNIER_CHECK(b.param != nullptr && b.grad != nullptr, "an update needs a parameter and a gradient");
  PANNIER_CHECK(b.rest != nullptr || batch.format == StateFormat::kFp32,
                "a 16-bit parameter needs the rest of its master");
  PANNIER_CHECK((b.state1 != nullptr || batch.algorithm == Algorithm::kSgd) && (b.state2 != nullptr || !is_adam),
                "algorithm " + std::to_string(static_cast<int>(batch.algorithm)) + " lacks a state buffer");
  PANNIER_CHECK(b.grad_type == batch.grad_type, "the runs of one launch have gradients of one type");
  PANNIER_CHECK((b.state1 != nullptr) == batch.has_state1, "the runs of one launch have the same states");
}

}  // namespace

UpdateBatch make_update_batch(Algorithm algorithm, StateFormat format, std::span<const UpdateTask> tasks) {
  UpdateBatch batch{.algorithm = algorithm, .format = format, .runs = {}};
  batch.runs.reserve(tasks.size());
  for (const auto& task : tasks) {
    const std::int64_t numel = task.buffers.numel;
    PANNIER_CHECK(numel >= 0, "a run of " + std::to_string(numel) + " elements");
    if (numel == 0) {
      continue;
    }
    if (batch.runs.empty()) {
      batch.grad_type = task.buffers.grad_type;
      batch.has_state1 = task.buffers.state1 != nullptr;
    }
    check_task(batch, task.buffers);
    batch.runs.push_back({task, batch.num_blocks});
    batch.num_blocks += (numel + kBlockNumel - 1) / kBlockNumel;
  }
  const GradType type = batch.grad_type;
  PANNIER_CHECK(!(format == StateFormat::kBf16 && type == GradType::kFp16), "a bf16 parameter has no fp16 gradient");
  PANNIER_CHECK(!(format == StateFormat::kFp16 && type == GradType::kBf16), "an fp16 parameter has no bf16 gradient");
  return batch;
}

void update(const UpdateBatch& batch, const UpdateRun* device_runs, const UpdateControl& control, Stream stream) {
  if (batch.num_blocks == 0) {
    return;
  }
  const detail::UpdateArguments arguments{device_runs, static_cast<int>(batch.runs.size()), control};
  switch (batch.algorithm) {
    case Algorithm::kAdamW:
      return detail::launch_adamw(batch, arguments, stream);
    case Algorithm::kAdam:
      return detail::launch_adam(batch, arguments, stream);
    case Algorithm::kSgd:
      return detail::launch_sgd(batch, arguments, stream);
    case Algorithm::kAdagrad:
      return detail::launch_adagrad(batch, arguments, stream);
    case Algorithm::kLion:
      return detail::launch_lion(batch, arguments, stream);
  }
}

}  // namespace pannier::kernels::cuda
