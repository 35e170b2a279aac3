// A condition variable that a forked child may destroy. The C library waits in destruction until every waiter has left;
// in a child, the waiters of its parent never do.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <memory>

namespace pannier {

/// Use as std::condition_variable, through the arrow. In a forked child it is left behind instead of destroyed.
class ForkSafeCondition {
 public:
  ForkSafeCondition() = default;
  ForkSafeCondition(const ForkSafeCondition&) = delete;
  ForkSafeCondition& operator=(const ForkSafeCondition&) = delete;
  ~ForkSafeCondition() {
    if (process_ != ::getpid()) {
      static_cast<void>(condition_.release());
    }
  }
  std::condition_variable* operator->() const noexcept { return condition_.get(); }

 private:
  std::unique_ptr<std::condition_variable> condition_ = std::make_unique<std::condition_variable>();
  pid_t process_ = ::getpid();
};

}  // namespace pannier
