// NCCL's operations run on streams, so nobody on the host waits for them here. What has not come to its end when its
// time is over is found by the monitor's thread; aborting NCCL then ends the kernels that wait on the device, and the
// host, should it be waiting for them, goes on to Communicator::check().
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <list>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "pannier/comm/c10d_parts.h"

namespace pannier {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// An operation as the monitor's thread follows it. It holds neither messages nor, once somebody waits, c10d's work,
/// which holds them too: device memory is free when the caller lets it go, not when the monitor has looked.
struct Running {
  std::uint32_t sequence = 0;
  Label label;
  GroupState::Clock::time_point since;
  std::mutex mutex;  ///< Guards what follows.
  bool is_starting = true;
  WorkPtr work;  ///< Until a stream waits for it.
  std::optional<c10::Event> end;

  [[nodiscard]] bool is_complete() {
    const std::lock_guard lock(mutex);
    if (end) {
      return end->query();
    }
    return !is_starting && (!work || work->isCompleted());
  }
  [[nodiscard]] std::exception_ptr error() {
    const std::lock_guard lock(mutex);
    return work ? work->exception() : nullptr;
  }
};

class NcclTransfer final : public Transfer {
 public:
  NcclTransfer(Operation operation, std::shared_ptr<Running> running)
      : operation_(std::move(operation)), running_(std::move(running)) {}

  [[nodiscard]] bool ready() const override { return true; }
  [[nodiscard]] std::string finish() override {
    const std::lock_guard lock(running_->mutex);
    running_->work->wait();  // Without a timeout: with one it would block the host.
    const c10::impl::VirtualGuardImpl device(operation_.buffers.device.type());
    running_->end.emplace(operation_.buffers.device.type());
    running_->end->record(device.getStream(operation_.buffers.device));
    running_->work.reset();
    operation_.buffers = {};
    return {};
  }

 private:
  Operation operation_;
  std::shared_ptr<Running> running_;  ///< Shared with the monitor's thread.
};

}  // namespace

/// Thread-safe.
class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(ProcessGroupPtr group) : group_(std::move(group)) {}

  [[nodiscard]] std::shared_ptr<Transfer> start(Operation operation) override {
    std::vector<at::Tensor> out;
    std::vector<at::Tensor> in;
    const at::Tensor none = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(operation.buffers.device));
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      for (auto [from, to] : {std::pair(&operation.buffers.send, &out), std::pair(&operation.buffers.receive, &in)}) {
        const at::Tensor& message = (*from)[static_cast<std::size_t>(rank)];
        to->push_back(rank != group_->getRank() && message.defined() ? message : none);
      }
    }
    const auto running = std::make_shared<Running>();
    running->sequence = operation.sequence;
    running->label = operation.label;
    running->since = GroupState::Clock::now();
    {
      const std::lock_guard lock(mutex_);
      running_.push_back(running);
    }
    // The first one waits for all ranks to connect, unless the group did that when it was made. So a rank with nothing
    // to send or receive takes part too.
    WorkPtr work = group_->alltoall(in, out);
    {
      const std::lock_guard lock(running->mutex);
      running->work = std::move(work);
      running->is_starting = false;
    }
    return std::make_shared<NcclTransfer>(std::move(operation), running);
  }

  [[nodiscard]] std::int64_t header_nbytes() const noexcept override { return 0; }

  void abort() noexcept override {
    std::list<std::shared_ptr<Running>> unfinished;
    {
      const std::lock_guard lock(mutex_);
      unfinished.swap(running_);
    }
    if (unfinished.empty()) {
      return;
    }
    try {
      group_->getBackend(c10::DeviceType::CUDA)->abort();
    } catch (const std::exception&) {  // The group is dead either way.
    }
    for (const auto& running : unfinished) {
      keep_until_exit(running);
    }
    keep_until_exit(std::make_shared<ProcessGroupPtr>(group_));
  }

  void close() noexcept override {}

  void poll(Monitor& monitor, std::chrono::milliseconds timeout) {
    std::list<std::shared_ptr<Running>> running;
    {
      const std::lock_guard lock(mutex_);
      running = running_;
    }
    std::size_t num_done = 0;
    for (const auto& it : running) {
      if (const auto error = it->error()) {
        monitor.report_failure(fmt::format("{}: {}", describe(it->label), text_of(error)));
        break;
      }
      if (!it->is_complete()) {
        if (GroupState::Clock::now() - it->since >= timeout) {
          monitor.report_overdue(it->sequence, it->label, std::chrono::duration<double>(timeout).count());
        }
        break;  // They end in order.
      }
      ++num_done;
    }
    const std::lock_guard lock(mutex_);
    for (; num_done > 0 && !running_.empty(); --num_done) {
      running_.pop_front();
    }
  }

 private:
  static std::string text_of(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& exception) {
      return c10::GetExceptionString(exception);
    }
  }

  ProcessGroupPtr group_;
  std::mutex mutex_;  ///< Guards the list.
  std::list<std::shared_ptr<Running>> running_;
};

std::shared_ptr<NcclTransport> make_nccl_transport(ProcessGroupPtr group) {
  return std::make_shared<NcclTransport>(std::move(group));
}

std::shared_ptr<Transport> as_transport(const std::shared_ptr<NcclTransport>& transport) { return transport; }

void poll(NcclTransport& transport, Monitor& monitor, std::chrono::milliseconds timeout) {
  transport.poll(monitor, timeout);
}

}  // namespace pannier
