#include "pannier/device/mover.h"

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void Transfer::wait_for(Stage stage, std::unique_lock<std::mutex>& lock) {
  stage_changed_.wait(lock, [&] { return error_ != nullptr || stage_ >= stage; });
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

EventPtr Transfer::wait_issued() {
  std::unique_lock lock(stage_mutex_);
  wait_for(Stage::kIssued, lock);
  return event_;
}

void Transfer::wait_done() {
  std::unique_lock lock(stage_mutex_);
  wait_for(Stage::kDone, lock);
}

void Transfer::wait_ended() noexcept {
  std::unique_lock lock(stage_mutex_);
  stage_changed_.wait(lock, [&] { return error_ != nullptr || stage_ == Stage::kDone; });
}

bool Transfer::is_issued() const {
  const std::lock_guard lock(stage_mutex_);
  return stage_ != Stage::kPushed;
}

bool Transfer::is_done() const {
  const std::lock_guard lock(stage_mutex_);
  return stage_ == Stage::kDone;
}

void Transfer::reach(Stage stage, EventPtr event) {
  {
    const std::lock_guard lock(stage_mutex_);
    stage_ = stage;
    if (event) {
      event_ = std::move(event);
    }
  }
  stage_changed_.notify_all();
}

void Transfer::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(stage_mutex_);
    error_ = std::move(error);
  }
  stage_changed_.notify_all();
}

Mover::Mover(Device& device, Queue queue, const MoverOptions& options)
    : device_(device), queue_(queue), options_(options), delay_(options.delay_seed) {
  PANNIER_CHECK(options.piece_nbytes > 0 && options.depth > 0, "a mover needs pieces and room for one");
  thread_ = std::thread([this] { work(); });
}

Mover::~Mover() { close(); }

TransferPtr Mover::push(std::vector<CopyRun> runs, std::vector<EventPtr> after, TransferPtr after_transfer,
                        const char* what, int index) {
  return enqueue({.runs = std::move(runs),
                  .after = std::move(after),
                  .after_transfer = std::move(after_transfer),
                  .transfer = std::make_shared<Transfer>(),
                  .label = {.what = what, .index = index}});
}

TransferPtr Mover::push_urgent(std::vector<CopyRun> runs, std::vector<EventPtr> after, TransferPtr after_transfer,
                               const char* what, int index) {
  return enqueue({.runs = std::move(runs),
                  .after = std::move(after),
                  .after_transfer = std::move(after_transfer),
                  .transfer = std::make_shared<Transfer>(),
                  .label = {.what = what, .index = index},
                  .is_urgent = true});
}

TransferPtr Mover::enqueue(Job job) {
  for (const CopyRun& run : job.runs) {
    job.label.nbytes += run.nbytes;
  }
  TransferPtr transfer = job.transfer;
  {
    const std::lock_guard lock(jobs_mutex_);
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    PANNIER_CHECK(!closing_, "a transfer was pushed to a mover that is closed");
    job.number = num_pushed_++;
    (job.is_urgent ? urgent_jobs_ : jobs_).push_back(std::move(job));
  }
  jobs_changed_.notify_one();
  return transfer;
}

void Mover::close() noexcept {
  {
    const std::lock_guard lock(jobs_mutex_);
    closing_ = true;
  }
  jobs_changed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

bool Mover::Job::is_ready() const {
  return (!after_transfer || after_transfer->is_done()) &&
         std::ranges::all_of(after, [](const EventPtr& event) { return event->is_done(); });
}

// Of two that are not ready the earlier goes first: in the queue it waits less long.
bool Mover::urgent_is_next() const {
  if (urgent_jobs_.empty() || jobs_.empty()) {
    return !urgent_jobs_.empty();
  }
  const Job& urgent = urgent_jobs_.front();
  return urgent.is_ready() || (urgent.number < jobs_.front().number && !jobs_.front().is_ready());
}

void Mover::work() {
  device_.attach_thread();
  while (true) {
    Job job;
    {
      std::unique_lock lock(jobs_mutex_);
      if (in_flight_.empty()) {
        jobs_changed_.wait(lock, [this] { return closing_ || !jobs_.empty() || !urgent_jobs_.empty(); });
      }
      if (std::deque<Job>& jobs = urgent_is_next() ? urgent_jobs_ : jobs_; !jobs.empty()) {
        job = std::move(jobs.front());
        jobs.pop_front();
      } else if (in_flight_.empty()) {
        return;
      }
    }
    try {
      job.transfer ? issue(job) : retire_oldest();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      std::deque<Job> rest;
      std::deque<Job> urgent;
      {
        const std::lock_guard lock(jobs_mutex_);
        error_ = error;
        rest.swap(jobs_);
        urgent.swap(urgent_jobs_);
      }
      // Whoever waits must wake, and be told.
      for (const InFlight& piece : std::exchange(in_flight_, {})) {
        if (piece.transfer) {
          piece.transfer->fail(error);
        }
      }
      if (job.transfer) {
        job.transfer->fail(error);
      }
      for (const std::deque<Job>& jobs : {rest, urgent}) {
        for (const Job& dropped : jobs) {
          dropped.transfer->fail(error);
        }
      }
    }
  }
}

void Mover::issue(const Job& job) {
  if (job.after_transfer) {
    // That transfer may be another mover's, which in turn waits for one that is in flight here.
    while (!in_flight_.empty() && !job.after_transfer->is_done()) {
      retire_oldest();
    }
    job.after_transfer->wait_done();
  }
  for (const EventPtr& event : job.after) {
    device_.wait(queue_, event);
  }
  const auto span = device_.trace().queued(queue_, job.label);
  std::size_t last = 0;  // The last run with anything in it.
  for (std::size_t i = 0; i < job.runs.size(); ++i) {
    last = job.runs[i].nbytes > 0 ? i : last;
  }
  bool issued = false;
  for (std::size_t i = 0; i < job.runs.size(); ++i) {
    const CopyRun& run = job.runs[i];
    for (std::size_t at = 0; at < run.nbytes; at += options_.piece_nbytes) {
      const std::size_t nbytes = std::min(options_.piece_nbytes, run.nbytes - at);
      const bool is_last = i == last && at + nbytes == run.nbytes;
      if (!job.is_urgent) {
        issue_urgent();
      }
      issue_piece({static_cast<char*>(run.to) + at, static_cast<const char*>(run.from) + at, nbytes},
                  is_last ? job.transfer : nullptr, job.is_urgent);
      issued = issued || is_last;
    }
  }
  if (!issued) {
    const EventPtr event = device_.record(queue_);
    job.transfer->reach(Transfer::Stage::kIssued, event);
    note_issued();
    in_flight_.push_back({event, job.transfer, 0});
  }
}

void Mover::issue_urgent() {
  while (true) {
    Job job;
    {
      const std::lock_guard lock(jobs_mutex_);
      if (urgent_jobs_.empty() || !urgent_jobs_.front().is_ready()) {
        return;
      }
      job = std::move(urgent_jobs_.front());
      urgent_jobs_.pop_front();
    }
    try {
      issue(job);
    } catch (...) {
      job.transfer->fail(std::current_exception());
      throw;
    }
  }
}

void Mover::issue_piece(const CopyRun& piece, const TransferPtr& last_of, bool is_urgent) {
  while (in_flight_.size() >= options_.depth) {
    retire_oldest();
  }
  delay_();
  if (!is_urgent) {
    wait_while_held();
  }
  device_.copy(queue_, piece.to, piece.from, piece.nbytes);
  const EventPtr event = device_.record(queue_);
  note_issued();
  in_flight_.push_back({event, last_of, piece.nbytes});
  if (last_of) {
    last_of->reach(Transfer::Stage::kIssued, event);
  }
}

void Mover::retire_oldest() {
  const InFlight oldest = std::move(in_flight_.front());
  in_flight_.pop_front();
  try {
    oldest.event->wait();
  } catch (...) {
    if (oldest.transfer) {
      oldest.transfer->fail(std::current_exception());
    }
    throw;
  }
  note_retired(oldest.nbytes);
  if (oldest.transfer) {
    oldest.transfer->reach(Transfer::Stage::kDone, nullptr);
  }
}

void Mover::note_issued() {
  const std::lock_guard lock(work_mutex_);
  if (!busy_since_) {
    busy_since_ = Clock::now();
  }
}

void Mover::note_retired(std::size_t nbytes) {
  const std::lock_guard lock(work_mutex_);
  const auto now = Clock::now();
  work_.nbytes += static_cast<double>(nbytes);
  work_.busy_s += std::chrono::duration<double>(now - *busy_since_).count();
  busy_since_ = in_flight_.empty() ? std::nullopt : std::optional(now);
}

MoverWork Mover::work_done() const {
  const std::lock_guard lock(work_mutex_);
  MoverWork work = work_;
  if (busy_since_) {
    work.busy_s += std::chrono::duration<double>(Clock::now() - *busy_since_).count();
  }
  return work;
}

void Mover::hold(std::chrono::microseconds most) {
  const std::lock_guard lock(jobs_mutex_);
  held_until_ = Clock::now() + most;
}

void Mover::go_on() {
  {
    const std::lock_guard lock(jobs_mutex_);
    held_until_ = {};
  }
  jobs_changed_.notify_one();
}

// A transfer that somebody waits for goes on when the time is over.
void Mover::wait_while_held() {
  std::unique_lock lock(jobs_mutex_);
  while (!closing_ && Clock::now() < held_until_) {
    jobs_changed_.wait_until(lock, held_until_);
  }
}

}  // namespace pannier
