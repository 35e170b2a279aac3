#include "pannier/engine/step_tracer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "pannier/base/error.h"
#include "pannier/base/log.h"

namespace pannier {
namespace {

using Json = nlohmann::ordered_json;

Json row_name(TraceRow row) {
  return {{"name", "thread_name"},
          {"ph", "M"},
          {"pid", 0},
          {"tid", static_cast<int>(row)},
          {"args", {{"name", to_string(row)}}}};
}

Json event_of(const TraceSpan& span) {
  const TraceLabel& label = span.label;
  Json args = Json::object();
  if (label.nbytes > 0) {
    args = {{"bytes", label.nbytes},
            {"GB/s", static_cast<double>(label.nbytes) / 1e9 / std::max(span.end_s - span.begin_s, 1e-9)}};
  }
  return {{"name", label.index < 0 ? std::string(label.what) : fmt::format("{} {}", label.what, label.index)},
          {"ph", "X"},
          {"pid", 0},
          {"tid", static_cast<int>(span.row)},
          {"ts", span.begin_s * 1e6},
          {"dur", (span.end_s - span.begin_s) * 1e6},
          {"args", std::move(args)}};
}

}  // namespace

std::string chrome_trace(const std::vector<TraceSpan>& spans, const std::string& title) {
  Json events = Json::array();
  events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", 0}, {"args", {{"name", title}}}});
  for (std::size_t row = 0; row < kNumTraceRows; ++row) {
    events.push_back(row_name(static_cast<TraceRow>(row)));
  }
  for (const TraceSpan& span : spans) {
    events.push_back(event_of(span));
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump() + "\n";
}

StepTracer::StepTracer(Device& device, StepTracerOptions options)
    : trace_(device.trace()), options_(std::move(options)), device_name_(device.name()) {
  // Whoever waits for a step that is hours away should not learn then that there is nowhere to put it.
  if (!options_.file.empty() && !std::ofstream(options_.file, std::ios::app)) {
    throw ConfigError(fmt::format("pannier.trace: '{}' can't be written: {}", options_.file, std::strerror(errno)));
  }
  if (wants_ticks() && options_.step == 1) {
    trace_.start();
  }
}

void StepTracer::close() noexcept {
  if (wants_ticks()) {
    written_ = true;
    log::warning(fmt::format("pannier.trace: training ended before step {}, so nothing was written to '{}'",
                             options_.step, options_.file));
  }
}

void StepTracer::begin_phase(const char* what) {
  host_phase_ = trace_.host(TraceRow::kCaller, {.what = what});
  device_phase_ = trace_.queued(Queue::kCompute, {.what = what});
}

void StepTracer::tick_forward(int unit) {
  if (unit == 0) {
    in_forward_ = true;
    begin_phase("forward");
  } else if (in_forward_) {  // Not what checkpointing runs again in backward.
    unit_.end();
    unit_ = trace_.queued(Queue::kCompute, {.what = "unit", .index = unit});
  }
}

void StepTracer::begin_backward() {
  in_forward_ = false;
  unit_.end();
  begin_phase("backward");
}

void StepTracer::end_backward() {
  host_phase_.end();
  device_phase_.end();
}

void StepTracer::end_step(std::int64_t num_steps) {
  if (options_.file.empty() || written_) {
    return;
  }
  if (trace_.is_on()) {
    written_ = true;
    write();
  } else if (num_steps + 1 == options_.step) {
    trace_.start();
  }
}

// A trace that can't be written is no reason to end the training.
void StepTracer::write() {
  const std::string text = chrome_trace(trace_.take(), fmt::format("step {} on {}", options_.step, device_name_));
  std::ofstream file(options_.file, std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    log::warning(fmt::format("pannier.trace: '{}' could not be written: {}", options_.file, std::strerror(errno)));
  }
}

}  // namespace pannier
