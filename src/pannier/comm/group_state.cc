#include "pannier/comm/group_state.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/comm/collective_error.h"

namespace pannier {

void GroupState::fail(const std::string& message) {
  bool first = false;
  change([&] {
    first = !failure_.has_value();
    failure_ = failure_.value_or(message);
  });
  if (first) {
    const std::lock_guard lock(handler_mutex_);
    if (const auto handler = std::exchange(handler_, nullptr)) {
      handler();
    }
  }
}

std::optional<std::string> GroupState::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void GroupState::throw_if_failed(const std::string& operation) const {
  if (const auto message = failure()) {
    const std::string text = fmt::format("{}: {}", operation, *message);
    const std::lock_guard lock(mutex_);
    throw CollectiveError(explain_ ? text + explain_(text) : text);
  }
}

void GroupState::explain_failures(std::function<std::string(const std::string&)> explain) {
  const std::lock_guard lock(mutex_);
  explain_ = std::move(explain);
}

void GroupState::on_failure(std::function<void()> handler) {
  const std::lock_guard lock(handler_mutex_);
  if (failure()) {
    handler();
  } else {
    handler_ = std::move(handler);
  }
}

void GroupState::drop_handler() {
  const std::lock_guard lock(handler_mutex_);
  handler_ = nullptr;
}

GroupState::Outcome GroupState::wait(Clock::time_point deadline, const std::function<bool()>& ready) {
  std::unique_lock lock(mutex_);
  while (!ready()) {
    if (failure_) {
      return Outcome::kFailed;
    }
    if (Clock::now() >= deadline) {
      return Outcome::kDeadline;
    }
    wait_a_while(lock, deadline);
  }
  return Outcome::kReady;
}

bool GroupState::wait_despite_failure(Clock::time_point deadline, const std::function<bool()>& ready) {
  std::unique_lock lock(mutex_);
  while (!ready()) {
    if (Clock::now() >= deadline) {
      return false;
    }
    wait_a_while(lock, deadline);
  }
  return true;
}

// Slices keep a deadline right when the system's clock is set: this is the one timed wait that ThreadSanitizer of
// GCC 12 understands.
void GroupState::wait_a_while(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
  constexpr auto kSlice = std::chrono::milliseconds(200);
  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
  const auto slice = std::clamp<std::chrono::microseconds>(left, std::chrono::microseconds(1), kSlice);
  changed_.wait_until(lock, std::chrono::system_clock::now() + slice);
}

}  // namespace pannier
