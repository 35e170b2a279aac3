#include "pannier/comm/monitor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "pannier/comm/rank_status.h"

namespace pannier {
namespace {

using Clock = GroupState::Clock;

constexpr auto kPatience = std::chrono::seconds(5);  ///< With a store or a thread that may hang.

std::string status_key(int rank) { return fmt::format("rank/{}", rank); }

/// What a thread of this rank asks the monitor to publish; composed when the store can be read.
struct Report {
  std::string message;
  bool is_overdue = false;  ///< Then the message is composed from where the ranks are.
  std::uint32_t sequence = 0;
  Label label{};
  double seconds = 0;
};

}  // namespace

struct MonitorShared {
  std::shared_ptr<GroupState> state;
  int rank = 0;
  int world_size = 0;
  MonitorOptions options;
  pid_t process = getpid();

  bool is_stopping = false;
  bool has_ended = false;
  std::vector<Report> reports;
  RankStatus position;
  std::function<void()> also_poll;

  void add(Report report) {
    state->change([&] { reports.push_back(std::move(report)); });
  }
};

namespace {

/// The thread's side.
class Watch {
 public:
  Watch(std::shared_ptr<MonitorShared> shared, std::unique_ptr<KeyValueStore> store)
      : shared_(std::move(shared)), store_(std::move(store)) {}

  void run() {
    bool stopping = false;
    while (!stopping) {
      std::vector<Report> reports;
      std::function<void()> also_poll;
      shared_->state->change([&] {
        stopping = shared_->is_stopping;
        reports.swap(shared_->reports);
        status_ = shared_->position;
        also_poll = shared_->also_poll;
      });
      if (also_poll) {
        also_poll();
      }
      try {
        poll(stopping, reports);
      } catch (const std::exception& error) {
        lose_store(error.what(), reports);
      }
      if (!stopping) {
        rest();
      }
    }
    store_.reset();
    std::function<void()> also_poll;  // Ends outside of the lock, with what it holds.
    shared_->state->change([&] { also_poll.swap(shared_->also_poll); });
    shared_->state->change([&] { shared_->has_ended = true; });
  }

 private:
  void poll(bool stopping, const std::vector<Report>& reports) {
    if (!store_) {
      for (const Report& report : reports) {
        adopt(report.message);
      }
      return;
    }
    status_.beat = ++beat_;
    status_.has_left = stopping;
    for (const Report& report : reports) {
      publish(report.is_overdue ? explain(report) : report.message);
    }
    // A rank leaves after its report is out, so that nobody sees it gone first.
    store_->set(status_key(shared_->rank), status_.to_text());
    if (!has_failed_) {
      if (const auto failure = store_->get("failure")) {
        adopt(*failure);
      }
    }
    if (!has_failed_ && !stopping) {
      watch();
    }
  }

  void rest() {
    shared_->state->wait_despite_failure(Clock::now() + shared_->options.poll_interval,
                                         [this] { return shared_->is_stopping || !shared_->reports.empty(); });
  }

  void adopt(const std::string& failure) {
    has_failed_ = true;
    shared_->state->fail(failure);
  }

  // The first to add to the counter publishes; the others take over what it says, unless it died in between.
  void publish(const std::string& message) {
    if (has_failed_) {
      return;
    }
    std::optional<std::string> failure;
    if (store_->add("failures", 1) == 1) {
      store_->set("failure", message);
      failure = message;
    }
    for (const auto deadline = Clock::now() + kPatience / 2; !failure && Clock::now() < deadline;) {
      failure = store_->get("failure");
      if (!failure) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    adopt(failure.value_or(message));
  }

  std::optional<RankStatus> read(int other) {
    const auto text = store_->get(status_key(other));
    return text ? RankStatus::from_text(*text) : std::nullopt;
  }

  std::string explain(const Report& report) {
    std::vector<std::string> reasons;
    for (int other = 0; other < shared_->world_size; ++other) {
      if (other != shared_->rank) {
        const std::string reason = reason_to_wait(other, read(other), report.sequence, report.label);
        if (!reason.empty()) {
          reasons.push_back(reason);
        }
      }
    }
    if (reasons.empty()) {
      return fmt::format("{} is not complete on rank {} after {:g} s, though every rank has reached it",
                         describe(report.label), shared_->rank, report.seconds);
    }
    return fmt::format("{} after {:g} s on rank {}", fmt::join(reasons, "; "), report.seconds, shared_->rank);
  }

  // The heartbeat of the next rank that has not left. If this process stood still itself, the others may have too (a
  // job that was stopped and continued), so that a long pause between two polls is little evidence.
  void watch() {
    const int world_size = shared_->world_size;
    const Clock::time_point now = Clock::now();
    silence_ += std::min<Clock::duration>(now - std::exchange(last_poll_, now), shared_->options.heartbeat_timeout / 5);
    for (int step = 1; step < world_size; ++step) {
      const int other = (shared_->rank + step) % world_size;
      const std::optional<RankStatus> status = read(other);
      if (status && status->has_left) {
        continue;
      }
      if (other != watched_ || !status || !watched_status_ || status->beat != watched_status_->beat) {
        watched_ = other;
        watched_status_ = status;
        silence_ = Clock::duration(0);
      }
      judge(other, status);
      return;
    }
  }

  void judge(int other, const std::optional<RankStatus>& status) {
    if (!status) {
      return;  // It has not come yet: who waits for it has a deadline.
    }
    const auto timeout = shared_->options.heartbeat_timeout;
    if (silence_ >= timeout) {
      publish(
          fmt::format("rank {} died (no heartbeat for {:g} s)", other, std::chrono::duration<double>(timeout).count()));
    } else if (status->num_begun > 0 && status->num_begun == status_.num_begun && status->label != status_.label) {
      publish(fmt::format("rank {} is in {} where rank {} is in {} (operation {})", other, describe(status->label),
                          shared_->rank, describe(status_.label), status_.num_begun - 1));
    }
  }

  // Whoever lost a connection at the same moment knows better than the store's error what happened.
  void lose_store(const char* why, std::vector<Report> reports) {
    store_.reset();
    if (reports.empty()) {
      shared_->state->wait_despite_failure(Clock::now() + std::chrono::seconds(1),
                                           [this] { return shared_->is_stopping || !shared_->reports.empty(); });
      shared_->state->change([&] { reports.swap(shared_->reports); });
    }
    for (const Report& report : reports) {
      if (!report.is_overdue) {
        adopt(report.message);
      }
    }
    adopt(fmt::format("the store of the group cannot be reached; its keeper, mostly rank 0, may have ended ({})", why));
  }

  const std::shared_ptr<MonitorShared> shared_;
  std::unique_ptr<KeyValueStore> store_;  ///< None after it was lost.
  RankStatus status_;
  std::uint64_t beat_ = 0;
  bool has_failed_ = false;
  int watched_ = -1;
  std::optional<RankStatus> watched_status_;
  Clock::duration silence_{0};  ///< Of the watched rank.
  Clock::time_point last_poll_ = Clock::now();
};

}  // namespace

Monitor::Monitor(std::unique_ptr<KeyValueStore> store, std::shared_ptr<GroupState> state, int rank, int world_size,
                 MonitorOptions options)
    : shared_(std::make_shared<MonitorShared>()) {
  shared_->state = std::move(state);
  shared_->rank = rank;
  shared_->world_size = world_size;
  shared_->options = options;
  // Detached: nothing joins it where a lock may be held that it needs, and a forked child has no such thread to join.
  std::thread([watch = std::make_unique<Watch>(shared_, std::move(store))] { watch->run(); }).detach();
}

Monitor::~Monitor() {
  if (getpid() == shared_->process) {
    shared_->state->change([this] { shared_->is_stopping = true; });
  }
}

void Monitor::also_poll(std::function<void()> poll) {
  shared_->state->change([&] { shared_->also_poll = std::move(poll); });
}

void Monitor::reached(std::uint32_t sequence, const Label& label) {
  shared_->state->change([&] {
    shared_->position.num_begun = sequence + 1;
    shared_->position.label = label;
  });
}

void Monitor::report_failure(const std::string& message) {
  shared_->add({.message = fmt::format("rank {} failed: {}", shared_->rank, message)});
}

void Monitor::report_lost(int other_rank, const std::string& operation, const std::string& why) {
  shared_->add({.message = fmt::format("rank {} died or left: its connection to rank {} ended during {} ({})",
                                       other_rank, shared_->rank, operation, why)});
}

void Monitor::report_overdue(std::uint32_t sequence, const Label& label, double seconds) {
  shared_->add({.message = fmt::format("{} is not complete after {:g} s", describe(label), seconds),
                .is_overdue = true,
                .sequence = sequence,
                .label = label,
                .seconds = seconds});
}

void Monitor::report_mismatch(const std::string& message) { shared_->add({.message = message}); }

void Monitor::wait_until_failed(const std::string& otherwise) {
  if (shared_->state->wait(Clock::now() + kPatience, [] { return false; }) == GroupState::Outcome::kDeadline) {
    shared_->state->fail(otherwise);
  }
}

void Monitor::close() {
  if (getpid() != shared_->process) {
    return;
  }
  shared_->state->change([this] { shared_->is_stopping = true; });
  shared_->state->wait_despite_failure(Clock::now() + kPatience, [this] { return shared_->has_ended; });
}

}  // namespace pannier
