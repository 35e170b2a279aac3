// The update arithmetic of every optimizer, one pass over memory: unscale, clip, decay, moments, master weight and the
// 16-bit parameter. kernels/reference.h states the maths as plain loops; cpu/ performs the same IEEE operations in the
// same order with SIMD, so that every instruction set and every processor gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pannier/base/parallel.h"

namespace pannier::kernels {

/// The update rules. kAdam is Adam with L2 decay (decay enters the gradient); kAdamW decays the weight.
enum class Algorithm : std::uint8_t { kAdamW, kAdam, kSgd, kAdagrad, kLion };

/// How a weight is stored. kFp32: the parameter is the master. kFp16: an fp32 master beside the fp16 parameter.
/// kBf16: the fp32 master split without loss in `hi`, the bf16 parameter itself, and `lo`, the signed 16-bit rest.
enum class StateFormat : std::uint8_t { kFp32, kFp16, kBf16 };

/// Element type of a gradient buffer.
enum class GradType : std::uint8_t { kFp32, kFp16, kBf16 };

/// The values that a parameter group sets, in fp64 as the user wrote them.
struct Hyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;           ///< AdamW, Adam, Lion.
  double beta2 = 0.999;         ///< AdamW, Adam, Lion (whose default is 0.99).
  double eps = 1e-8;            ///< AdamW, Adam, Adagrad.
  double weight_decay = 0.0;    ///< Decoupled in AdamW and Lion, added to the gradient elsewhere.
  double momentum = 0.0;        ///< SGD.
  double dampening = 0.0;       ///< SGD.
  double lr_decay = 0.0;        ///< Adagrad.
  bool nesterov = false;        ///< SGD.
  bool bias_correction = true;  ///< AdamW, Adam.
};

/// The fp32 constants of one update, each computed in fp64 and rounded once.
struct UpdateCoefficients {
  float grad_factor = 1;      ///< Unscale times clip; multiplies the gradient first.
  float neg_lr_decay = 0;     ///< -lr * weight_decay (decoupled rules): w = fma(neg_lr_decay, w, w).
  float weight_decay = 0;     ///< L2 rules: g = fma(weight_decay, w, g).
  float beta1 = 0;            ///< First decay factor, or SGD's momentum.
  float one_minus_beta1 = 0;  ///< Or SGD's 1 - dampening (1 on a parameter's first step).
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float neg_step_size = 0;   ///< -lr / bias_correction1, or -lr.
  float inv_sqrt_bias2 = 1;  ///< 1 / sqrt(bias_correction2).
  float eps = 0;
  bool nesterov = false;
};

/// Computes the constants for a parameter's `step`-th update (counted from 1) with the gradient multiplied by
/// `grad_factor`.
[[nodiscard]] UpdateCoefficients make_coefficients(Algorithm algorithm, const Hyperparameters& hyper, std::int64_t step,
                                                   float grad_factor);

/// The buffers of one run of elements of one parameter. None may overlap; natural alignment suffices.
struct UpdateBuffers {
  void* param = nullptr;       ///< kFp32: float, updated. kFp16: fp16, written only. kBf16: `hi`, updated.
  void* rest = nullptr;        ///< kFp16: the float master, updated. kBf16: int16 `lo`, updated. kFp32: unused.
  float* state1 = nullptr;     ///< exp_avg, momentum_buffer or sum.
  float* state2 = nullptr;     ///< exp_avg_sq.
  const void* grad = nullptr;  ///< Of type `grad_type`.
  GradType grad_type = GradType::kFp32;
  std::int64_t numel = 0;
};

/// Names of the per-element fp32 states a rule keeps, in order state1, state2, as torch names them. `momentum` is
/// SGD's.
[[nodiscard]] std::vector<std::string> state_names(Algorithm algorithm, double momentum);

/// The instruction sets that this build has and this machine runs, best first, by Highway's names, and last
/// "reference".
[[nodiscard]] std::vector<std::string> available_targets();

/// Updates one run of elements on the calling thread. `target` is a name of available_targets(); empty picks the best.
/// Sets rounding to nearest and denormals on while it runs and restores the caller's modes. Throws InternalError for an
/// unknown target or a combination of format and gradient type that cannot occur (fp16 gradient of a bf16 parameter).
void update(Algorithm algorithm, StateFormat format, const UpdateCoefficients& coefficients,
            const UpdateBuffers& buffers, const std::string& target = {});

/// Elements [begin, begin + numel) of a run.
[[nodiscard]] UpdateBuffers slice(StateFormat format, const UpdateBuffers& buffers, std::int64_t begin,
                                  std::int64_t numel);

/// One entry of a batch: a run with its own constants.
struct UpdateTask {
  UpdateCoefficients coefficients;
  UpdateBuffers buffers;
};

/// What is decided after the work was issued, as pointers to memory of the processor that updates.
struct UpdateControl {
  const float* grad_factor = nullptr;   ///< Replaces every run's own; null: the runs' own.
  const std::uint32_t* skip = nullptr;  ///< Not zero: nothing is changed. Null: never.
};

/// Updates many runs, split over threads in cache-sized tiles. The split never changes results.
void update_all(Algorithm algorithm, StateFormat format, const std::vector<UpdateTask>& tasks,
                const ParallelFor& parallel, const std::string& target = {});

}  // namespace pannier::kernels
