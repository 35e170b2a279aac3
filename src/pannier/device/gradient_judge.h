// Looks at the gradients of a window where they lie and decides the step: the global norm, whether anything is not
// finite, and so the factor of the update or a skip. The result rests where the update reads it; the host may ask for
// it when it needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "pannier/kernels/decision.h"
#include "pannier/kernels/gradient.h"
#include "pannier/kernels/update.h"

namespace pannier {

/// A gradient, or a part of one that starts at a block edge, in the judge's memory.
struct GradientRun {
  const void* data = nullptr;
  kernels::GradType type = kernels::GradType::kFp32;
  std::int64_t numel = 0;
  int parameter = 0;
};

/// What the host is told.
struct Verdict {
  kernels::Decision decision{};
  int first_nonfinite_parameter = -1;  ///< The least index with an element that is not finite; -1: none on this rank.
};

/// Sums up gradients, then decides. One thread at a time; a GPU's work runs in the order of the caller's stream.
class GradientJudge {
 public:
  GradientJudge() = default;
  virtual ~GradientJudge() = default;
  GradientJudge(const GradientJudge&) = delete;
  GradientJudge& operator=(const GradientJudge&) = delete;

  /// Forgets all that was added.
  virtual void reset() = 0;
  /// Adds gradients in the judge's memory, which must stay until the device has read them in stream order.
  virtual void add(const std::vector<GradientRun>& runs) = 0;
  /// Adds what was found about a parameter's gradient elsewhere.
  virtual void add_stats(const kernels::GradientStats& stats, int parameter) = 0;
  /// Lets `exchange`, called once, replace the numbers that ranks sum (limbs and count) by their sums. The host waits.
  virtual void exchange(const std::function<void(std::span<std::int64_t>)>& exchange) = 0;
  /// Decides from what was added.
  virtual void decide(const kernels::DecisionInputs& inputs) = 0;
  /// Points to the decision, in the judge's memory; valid for the judge's life.
  [[nodiscard]] virtual kernels::UpdateControl control() const = 0;
  /// The decision. The host waits until it is made.
  [[nodiscard]] virtual Verdict verdict() = 0;
};

/// For gradients in host memory, which on the metered CPU is the device's.
[[nodiscard]] std::unique_ptr<GradientJudge> make_cpu_judge();

}  // namespace pannier
