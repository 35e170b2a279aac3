// "pannier.trace": one step of a run as a file that chrome://tracing and Perfetto open. It begins when the step before
// ends, so that what that step left to do (states on their way back) is in it, and ends when the step returns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pannier/device/device.h"

namespace pannier {

/// Which step to trace, and where to.
struct StepTracerOptions {
  std::string file;       ///< Written whole when the step has ended.
  std::int64_t step = 1;  ///< Counted from 1, skipped ones too.
};

/// Draws the phases of a step around what the parts draw themselves. One thread. Scopes cost next to nothing in steps
/// that are not traced; a profiler sees their ranges in each.
class StepTracer {
 public:
  /// Without a file nothing is ever written. Throws ConfigError where the file can't be written.
  StepTracer(Device& device, StepTracerOptions options);

  /// Whether units should tick.
  [[nodiscard]] bool wants_ticks() const noexcept { return !options_.file.empty() && !written_; }
  /// A unit begins; 0: the model.
  void tick_forward(int unit);
  void begin_backward();
  void end_backward();
  /// Inside step(): until the scope ends.
  [[nodiscard]] StepTrace::Scope phase(const char* what) { return trace_.host(TraceRow::kCaller, {.what = what}); }
  /// step() returns; `num_steps` have ended. Begins or writes the trace when it is time.
  void end_step(std::int64_t num_steps);
  /// The run ends; says so where that is before the step.
  void close() noexcept;

 private:
  void begin_phase(const char* what);
  void write();

  StepTrace& trace_;
  StepTracerOptions options_;
  std::string device_name_;
  StepTrace::Scope host_phase_;
  StepTrace::Scope device_phase_;
  StepTrace::Scope unit_;
  bool in_forward_ = false;
  bool written_ = false;
};

/// The spans as Chrome's trace events, one row a thread, times in microseconds.
[[nodiscard]] std::string chrome_trace(const std::vector<TraceSpan>& spans, const std::string& title);

}  // namespace pannier
