#include "pannier/io/io_transfer.h"

#include <utility>

namespace pannier {

IoTransfer::IoTransfer(std::size_t nbytes, OnTransferEnd on_end) : nbytes_left_(nbytes), on_end_(std::move(on_end)) {
  if (nbytes == 0) {
    advance(0);
  }
}

void IoTransfer::wait_done() {
  std::unique_lock lock(state_mutex_);
  state_changed_->wait(lock, [this] { return has_ended_; });
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

void IoTransfer::wait_ended() noexcept {
  std::unique_lock lock(state_mutex_);
  state_changed_->wait(lock, [this] { return has_ended_; });
}

bool IoTransfer::is_done() const {
  const std::lock_guard lock(state_mutex_);
  return has_ended_;
}

void IoTransfer::advance(std::size_t nbytes) noexcept {
  OnTransferEnd on_end;
  bool succeeded = false;
  {
    const std::lock_guard lock(state_mutex_);
    nbytes_left_ -= nbytes;
    if (nbytes_left_ > 0) {
      return;
    }
    succeeded = error_ == nullptr;
    on_end = std::move(on_end_);
  }
  // Before the waiters wake, so that they see what it does; without the lock, so that it may take its own.
  if (on_end) {
    on_end(succeeded);
  }
  const std::lock_guard lock(state_mutex_);
  has_ended_ = true;
  state_changed_->notify_all();
}

void IoTransfer::fail(std::exception_ptr error) noexcept {
  const std::lock_guard lock(state_mutex_);
  if (error_ == nullptr) {
    error_ = std::move(error);
  }
}

bool IoTransfer::has_failed() const noexcept {
  const std::lock_guard lock(state_mutex_);
  return error_ != nullptr;
}

}  // namespace pannier
