#include "pannier/device/step_trace.h"

#include <algorithm>
#include <array>
#include <utility>

#include "pannier/device/device.h"

namespace pannier {
namespace {

TraceRow row_of(Queue queue) {
  return queue == Queue::kUp ? TraceRow::kUp : queue == Queue::kDown ? TraceRow::kDown : TraceRow::kCompute;
}

Queue queue_of(TraceRow row) {
  return row == TraceRow::kUp ? Queue::kUp : row == TraceRow::kDown ? Queue::kDown : Queue::kCompute;
}

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

const char* to_string(TraceRow row) noexcept {
  constexpr std::array<const char*, kNumTraceRows> kNames{"caller", "host updates", "device compute", "to the device",
                                                          "to the host"};
  return kNames[static_cast<std::size_t>(row)];
}

StepTrace::Scope& StepTrace::Scope::operator=(Scope&& other) noexcept {
  if (this != &other) {
    end();
    trace_ = std::exchange(other.trace_, nullptr);
    window_ = other.window_;
    row_ = other.row_;
    label_ = other.label_;
    begin_ = other.begin_;
    begin_event_ = std::move(other.begin_event_);
    range_ = other.range_;
  }
  return *this;
}

void StepTrace::Scope::end() noexcept {
  if (StepTrace* trace = std::exchange(trace_, nullptr)) {
    if (range_ != 0) {
      trace->device_.end_range(range_);
    }
    try {
      trace->keep(*this);
    } catch (...) {
      // A trace that lacks a span is better than training that ends.
    }
    begin_event_ = nullptr;
  }
}

void StepTrace::start() {
  began_event_ = device_.record_time(Queue::kCompute);
  began_event_->wait();
  began_ = std::chrono::steady_clock::now();
  window_ = ++num_windows_;
}

std::vector<TraceSpan> StepTrace::take() {
  window_ = 0;
  std::vector<TraceSpan> spans;
  std::vector<QueueSpan> queued;
  {
    const std::lock_guard lock(spans_mutex_);
    spans.swap(host_spans_);
    queued.swap(queue_spans_);
  }
  for (const QueueSpan& span : queued) {
    span.end->wait();
    spans.push_back({span.row, span.label, device_.seconds_between(began_event_, span.begin),
                     device_.seconds_between(began_event_, span.end)});
  }
  began_event_ = nullptr;
  std::stable_sort(spans.begin(), spans.end(),
                   [](const TraceSpan& left, const TraceSpan& right) { return left.begin_s < right.begin_s; });
  return spans;
}

StepTrace::Scope StepTrace::host(TraceRow row, const TraceLabel& label) {
  Scope scope;
  scope.trace_ = this;
  scope.window_ = window_;
  scope.row_ = row;
  scope.label_ = label;
  scope.begin_ = std::chrono::steady_clock::now();
  scope.range_ = device_.begin_range(label.what, label.index);
  return scope;
}

StepTrace::Scope StepTrace::queued(Queue queue, const TraceLabel& label) {
  Scope scope;
  if (is_on()) {
    scope.trace_ = this;
    scope.window_ = window_;
    scope.row_ = row_of(queue);
    scope.label_ = label;
    scope.begin_event_ = device_.record_time(queue);
  }
  return scope;
}

void StepTrace::keep(Scope& scope) {
  if (!is_on() || (scope.begin_event_ && scope.window_ != window_)) {
    return;  // It ends after the traced step, or the device's time of its beginning was not taken.
  }
  if (!scope.begin_event_) {
    const auto end = std::chrono::steady_clock::now();
    const std::lock_guard lock(spans_mutex_);
    host_spans_.push_back(
        {scope.row_, scope.label_, std::max(0.0, seconds(scope.begin_ - began_)), seconds(end - began_)});
    return;
  }
  QueueSpan span{scope.row_, scope.label_, std::move(scope.begin_event_), device_.record_time(queue_of(scope.row_))};
  const std::lock_guard lock(spans_mutex_);
  queue_spans_.push_back(std::move(span));
}

}  // namespace pannier
