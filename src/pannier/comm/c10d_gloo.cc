// Point to point rather than Gloo's all-to-all, because
//  - every piece is sent from where it lies, to all from one place if it is the same for all;
//  - a lost connection belongs to one rank, which the error names;
//  - a wait for one message can be given up, so that no thread is left waiting in Gloo;
//  - each message has its own tag, and a header that is checked before the message is received. A message longer than
//    its buffer ends the process inside Gloo, and a shorter one is taken without a word.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <unistd.h>

#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "pannier/comm/c10d_parts.h"

namespace pannier {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr auto kPatience = std::chrono::seconds(5);

class GlooTransfer final : public Transfer {
 public:
  explicit GlooTransfer(Operation started) : operation(std::move(started)) {}

  [[nodiscard]] bool ready() const override { return is_done; }
  [[nodiscard]] std::string finish() override { return {}; }
  /// Leaves the messages to their owner alone, before he is told, so that memory is free when he lets it go.
  void release() {
    sends.clear();
    header_receives.clear();
    message_receives.clear();
    operation.buffers = {};
  }

  Operation operation;
  bool is_done = false;  ///< Guarded by the group state's lock.
  // What Gloo works on until the operation ends: it must live as long as Gloo may touch it.
  std::vector<MessageHeader> headers_out;
  std::vector<MessageHeader> headers_in;
  std::vector<std::pair<int, WorkPtr>> sends;  ///< With the other rank.
  std::vector<std::pair<int, WorkPtr>> header_receives;
  std::vector<std::pair<int, WorkPtr>> message_receives;
};

/// A wait was given up because the group has failed or was closed.
struct GivenUp {};
/// The connection to a rank has ended.
struct LostRank {
  int rank;
  std::string why;
};

/// What the thread shares with the transport. The queue and the flags are guarded by the group state's lock.
struct GlooShared {
  ProcessGroupPtr group;
  std::shared_ptr<GroupState> state;
  std::shared_ptr<Monitor> monitor;
  std::deque<std::shared_ptr<GlooTransfer>> queue;
  bool is_stopping = false;
  bool has_ended = false;

  std::mutex wait_mutex;  ///< Guards what follows.
  bool is_given_up = false;
  WorkPtr waited_for;

  void give_up() {
    const std::lock_guard lock(wait_mutex);
    is_given_up = true;
    if (waited_for) {
      waited_for->abort();
    }
  }
};

/// The thread's side: one operation after the other.
class GlooWorker {
 public:
  explicit GlooWorker(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)) {}

  void run() {
    const c10::NoGradGuard no_grad;
    while (const auto transfer = next()) {
      if (!attempt(*transfer)) {
        break;
      }
      transfer->release();
      shared_->state->change([&] {
        transfer->is_done = true;
        shared_->queue.pop_front();
      });
    }
    keep_unfinished();
    shared_->state->change([&] { shared_->has_ended = true; });
  }

 private:
  std::shared_ptr<GlooTransfer> next() {
    std::shared_ptr<GlooTransfer> transfer;
    const auto is_there = [&] {
      transfer = shared_->queue.empty() ? nullptr : shared_->queue.front();
      return transfer != nullptr || shared_->is_stopping;
    };
    while (shared_->state->wait(GroupState::Clock::time_point::max(), is_there) == GroupState::Outcome::kDeadline) {
    }
    return shared_->state->failure() ? nullptr : transfer;
  }

  // Returns whether the operation came to its end.
  bool attempt(GlooTransfer& transfer) {
    const std::string name = describe(transfer.operation.label);
    try {
      const std::string wrong = perform(transfer);
      if (wrong.empty()) {
        return true;
      }
      shared_->monitor->report_mismatch(wrong);
      shared_->monitor->wait_until_failed(wrong);
    } catch (const GivenUp&) {
      return false;
    } catch (const LostRank& lost) {
      shared_->monitor->report_lost(lost.rank, name, lost.why);
      shared_->monitor->wait_until_failed(fmt::format("the connection to rank {} ended", lost.rank));
    } catch (const std::exception& error) {
      shared_->monitor->report_failure(fmt::format("{}: {}", name, error.what()));
      shared_->monitor->wait_until_failed(error.what());
    }
    return false;
  }

  // Gloo may still read or write what was not finished, and the group's end would wait for it.
  void keep_unfinished() {
    std::deque<std::shared_ptr<GlooTransfer>> unfinished;
    shared_->state->change([&] { unfinished.swap(shared_->queue); });
    for (auto& transfer : unfinished) {
      keep_until_exit(transfer);
      keep_until_exit(std::make_shared<ProcessGroupPtr>(shared_->group));
    }
  }

  std::string perform(GlooTransfer& transfer) {
    begin(transfer);
    const int rank = shared_->group->getRank();
    const Operation& operation = transfer.operation;
    for (const auto& [from, header] : transfer.header_receives) {
      wait(header, from);
      const at::Tensor& message = operation.buffers.receive[static_cast<std::size_t>(from)];
      const MessageHeader expected{make_stamp(operation.label, from, operation.sequence), nbytes_of(message)};
      std::string wrong = difference(expected, transfer.headers_in[static_cast<std::size_t>(from)], rank);
      if (!wrong.empty()) {
        return wrong;
      }
      if (expected.nbytes > 0) {
        transfer.message_receives.emplace_back(from, receive(message, from, operation, 1));
      }
    }
    for (const auto* works : {&transfer.message_receives, &transfer.sends}) {
      for (const auto& [other, work] : *works) {
        wait(work, other);
      }
    }
    return {};
  }

  // Offers everything that is to be sent, and takes all headers. Gloo sends a message when the other side receives it.
  void begin(GlooTransfer& transfer) {
    const Operation& operation = transfer.operation;
    const int rank = shared_->group->getRank();
    const int world_size = shared_->group->getSize();
    transfer.headers_out.resize(static_cast<std::size_t>(world_size));
    transfer.headers_in.resize(static_cast<std::size_t>(world_size));
    for (int step = 1; step < world_size; ++step) {
      const int to = (rank + step) % world_size;
      const int from = (rank - step + world_size) % world_size;
      transfer.header_receives.emplace_back(from, receive(header_bytes(transfer.headers_in, from), from, operation, 0));
      const at::Tensor& message = operation.buffers.send[static_cast<std::size_t>(to)];
      transfer.headers_out[static_cast<std::size_t>(to)] = {make_stamp(operation.label, rank, operation.sequence),
                                                            nbytes_of(message)};
      transfer.sends.emplace_back(to, send(header_bytes(transfer.headers_out, to), to, operation, 0));
      if (nbytes_of(message) > 0) {
        transfer.sends.emplace_back(to, send(message, to, operation, 1));
      }
    }
  }

  static std::int64_t nbytes_of(const at::Tensor& message) { return message.defined() ? message.numel() : 0; }

  static at::Tensor header_bytes(std::vector<MessageHeader>& headers, int rank) {
    return at::from_blob(&headers[static_cast<std::size_t>(rank)], {std::int64_t{sizeof(MessageHeader)}}, at::kByte);
  }

  // Two tags an operation, so that messages of different operations never meet.
  static int tag_of(const Operation& operation, int part) {
    return static_cast<int>((operation.sequence & 0x3fffffffU) * 2U) + part;
  }

  WorkPtr send(const at::Tensor& bytes, int to, const Operation& operation, int part) {
    std::vector<at::Tensor> tensors{bytes};
    return attributed(to, [&] { return shared_->group->send(tensors, to, tag_of(operation, part)); });
  }

  WorkPtr receive(const at::Tensor& bytes, int from, const Operation& operation, int part) {
    std::vector<at::Tensor> tensors{bytes};
    return attributed(from, [&] { return shared_->group->recv(tensors, from, tag_of(operation, part)); });
  }

  // Gloo's own deadline is the group's, far away; a failure of the group ends the wait at once.
  void wait(const WorkPtr& work, int other) {
    {
      const std::lock_guard lock(shared_->wait_mutex);
      shared_->waited_for = work;
      if (shared_->is_given_up) {
        throw GivenUp();
      }
    }
    const bool has_arrived = attributed(other, [&] { return work->wait(); });
    const std::lock_guard lock(shared_->wait_mutex);
    shared_->waited_for.reset();
    if (!has_arrived || shared_->is_given_up) {
      throw GivenUp();
    }
  }

  template <class Body>
  auto attributed(int other, Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& error) {
      throw LostRank{other, c10::GetExceptionString(error)};
    }
  }

  std::shared_ptr<GlooShared> shared_;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(std::shared_ptr<GlooShared> shared) : shared_(std::move(shared)), process_(getpid()) {
    // Detached for the monitor's reasons: it shares all that it touches, and nothing needs to join it.
    std::thread([worker = std::make_unique<GlooWorker>(shared_)] { worker->run(); }).detach();
  }
  ~GlooTransport() override { stop(); }

  [[nodiscard]] std::shared_ptr<Transfer> start(Operation operation) override {
    auto transfer = std::make_shared<GlooTransfer>(std::move(operation));
    shared_->state->change([&] { shared_->queue.push_back(transfer); });
    return transfer;
  }
  [[nodiscard]] std::int64_t header_nbytes() const noexcept override { return sizeof(MessageHeader); }
  void abort() noexcept override { shared_->give_up(); }
  void close() noexcept override {
    stop();
    shared_->state->wait_despite_failure(GroupState::Clock::now() + kPatience, [this] { return shared_->has_ended; });
  }

 private:
  void stop() noexcept {
    if (getpid() == process_) {
      shared_->give_up();
      shared_->state->change([this] { shared_->is_stopping = true; });
    }
  }

  std::shared_ptr<GlooShared> shared_;
  pid_t process_;
};

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(ProcessGroupPtr group, std::shared_ptr<GroupState> state,
                                               std::shared_ptr<Monitor> monitor) {
  auto shared = std::make_shared<GlooShared>();
  shared->group = std::move(group);
  shared->state = std::move(state);
  shared->monitor = std::move(monitor);
  return std::make_shared<GlooTransport>(std::move(shared));
}

}  // namespace pannier
