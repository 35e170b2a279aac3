// Arithmetic where the data is. The update, the norm and the accumulation are the same operations on every processor
// (kernels/); a Compute says on which one they run.
#pragma once

#include <cstdint>
#include <vector>

#include "pannier/kernels/gradient.h"
#include "pannier/kernels/update.h"

namespace pannier {

/// Runs kernels on one processor. Calls are ordered; those of the CPU have finished when they return, those of a GPU
/// run in the order of the caller's current stream. One caller at a time.
class Compute {
 public:
  Compute() = default;
  virtual ~Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  /// Updates many runs; see kernels::update_all. `control` points to memory of this processor.
  virtual void update(kernels::Algorithm algorithm, kernels::StateFormat format,
                      const std::vector<kernels::UpdateTask>& tasks, const kernels::UpdateControl& control) = 0;
  /// sum += grad in fp32, or sum = grad where `first`.
  virtual void accumulate(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) = 0;
  /// Splits an fp32 master into bf16 `hi` and `lo`.
  virtual void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) = 0;
  /// Joins `hi` and `lo` to the fp32 master.
  virtual void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) = 0;
  /// Rounds fp32 to fp16.
  virtual void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) = 0;
};

/// The CPU, on torch's own thread pool (at::parallel_for), so that no second pool fights it.
class CpuCompute final : public Compute {
 public:
  /// Updates run on at most so many threads; 0: on all of torch's.
  explicit CpuCompute(int most_threads = 0) : most_threads_(most_threads) {}
  void update(kernels::Algorithm algorithm, kernels::StateFormat format, const std::vector<kernels::UpdateTask>& tasks,
              const kernels::UpdateControl& control) override;
  void accumulate(float* sum, const void* grad, kernels::GradType type, std::int64_t numel, bool first) override;
  void split_master(const float* master, std::uint16_t* hi, std::int16_t* lo, std::int64_t numel) override;
  void join_master(const std::uint16_t* hi, const std::int16_t* lo, float* master, std::int64_t numel) override;
  void to_fp16(const float* from, std::uint16_t* to, std::int64_t numel) override;

 private:
  int most_threads_;
};

/// torch's thread pool as a ParallelFor.
[[nodiscard]] ParallelFor torch_parallel_for();
/// The same on at most `most_threads`, each of which takes the next piece of `grain` when it has done its last: one
/// that is held up, by the work of others on its core, holds up a piece and not a whole share. The threads beyond
/// sleep, where at::parallel_for has them spin beside the work.
[[nodiscard]] ParallelFor torch_parallel_for(int most_threads);
/// How many threads work on the host's side of a step: torch's number. torchrun gives each of several ranks on a
/// machine one thread, where OMP_NUM_THREADS says nothing; such a rank works with its share of the cores.
[[nodiscard]] int host_threads();
/// The same of an environment and a number of usable cores.
[[nodiscard]] int host_threads(const std::function<const char*(const char*)>& environment, int num_cores);

}  // namespace pannier
