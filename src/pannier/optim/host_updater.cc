#include "pannier/optim/host_updater.h"

#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/optim/tiled_update.h"

namespace pannier {

HostUpdater::HostUpdater(Mover& up, int num_buckets, const HostUpdaterOptions& options)
    : up_(up),
      options_(options),
      compute_(options.most_threads),
      delay_(options.delay_seed),
      sent_(static_cast<std::size_t>(num_buckets)) {
  thread_ = std::thread([this] { work(); });
}

HostUpdater::~HostUpdater() { close(); }

void HostUpdater::start(std::vector<BucketUpdate> updates, float grad_factor, EventPtr after) {
  {
    const std::lock_guard lock(updates_mutex_);
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    PANNIER_CHECK(updates_.empty() && !closing_, "updates were begun while others run, or after the end");
    for (const BucketUpdate& update : updates) {
      sent_.at(static_cast<std::size_t>(update.bucket)) = nullptr;
    }
    updates_.assign(std::make_move_iterator(updates.begin()), std::make_move_iterator(updates.end()));
    grad_factor_ = grad_factor;
    after_ = std::move(after);
  }
  changed_.notify_all();
}

EventPtr HostUpdater::wait_issued(int bucket) {
  TransferPtr sent;
  {
    std::unique_lock lock(updates_mutex_);
    if (is_paused_ && error_ == nullptr) {
      is_paused_ = false;  // It was told of.
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return error_ != nullptr || sent_.at(static_cast<std::size_t>(bucket)) != nullptr; });
    if (error_ != nullptr && !is_paused_) {
      std::rethrow_exception(error_);
    }
    if (sent_[static_cast<std::size_t>(bucket)] == nullptr) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
    sent = sent_[static_cast<std::size_t>(bucket)];
  }
  return sent->wait_issued();
}

HostUpdateTime HostUpdater::take_time() {
  const std::lock_guard lock(updates_mutex_);
  return std::exchange(time_, {});
}

void HostUpdater::close() noexcept {
  {
    const std::lock_guard lock(updates_mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void HostUpdater::work() {
  while (true) {
    BucketUpdate* next = nullptr;
    {
      std::unique_lock lock(updates_mutex_);
      changed_.wait(lock, [this] { return closing_ || (!updates_.empty() && !is_paused_); });
      if (updates_.empty() || is_paused_) {
        return;
      }
      next = &updates_.front();  // Nobody else touches it before it is popped.
    }
    try {
      run(*next);
    } catch (const IoError&) {
      {
        const std::lock_guard lock(updates_mutex_);
        error_ = std::current_exception();
        is_paused_ = true;
      }
      changed_.notify_all();
    } catch (...) {
      {
        const std::lock_guard lock(updates_mutex_);
        error_ = std::current_exception();
        updates_.clear();
      }
      changed_.notify_all();
    }
  }
}

void HostUpdater::run(BucketUpdate& update) {
  delay_();
  std::optional<Lease> lease;
  if (update.later) {
    lease.emplace(update.later->store->lease(update.later->chunk, Access::kTiles));
    update.place(lease->view());
  }
  const std::uint32_t skip = 0;
  auto span = up_.device().trace().host(TraceRow::kHostUpdates, {.what = "update", .index = update.bucket});
  const MoverWork before = options_.down == nullptr ? MoverWork{} : options_.down->work_done();
  const auto begin = std::chrono::steady_clock::now();
  if (lease) {
    update_in_tiles(*update.later->store, *lease, update.tasks, grad_factor_,
                    {options_.algorithm, options_.format, options_.most_threads});
  } else {
    compute_.update(options_.algorithm, options_.format, update.tasks, {&grad_factor_, &skip});
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  span.end();
  TransferPtr sent = up_.push({update.parameter}, {after_}, nullptr, "parameters", update.bucket);
  if (lease) {
    lease->is_read_by(sent);
    lease.reset();
  }
  {
    const std::lock_guard lock(updates_mutex_);
    if (update.is_last) {  // What was sent before arrives before.
      sent_[static_cast<std::size_t>(update.bucket)] = std::move(sent);
    }
    time_.numel += update.numel();
    time_.seconds += time.count();
    if (options_.down != nullptr) {
      const MoverWork down = work_since(before, *options_.down);
      time_.down.nbytes += down.nbytes;
      time_.down.busy_s += down.busy_s;
    }
    updates_.pop_front();
  }
  changed_.notify_all();
}

}  // namespace pannier
