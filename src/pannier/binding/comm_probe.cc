#include "pannier/binding/comm_probe.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "pannier/binding/classes.h"
#include "pannier/comm/c10d_group.h"

namespace pannier::binding {
namespace {

GroupOptions to_options(std::int64_t timeout_ms, std::int64_t poll_ms, std::int64_t heartbeat_ms) {
  return {.collective_timeout = std::chrono::milliseconds(timeout_ms),
          .monitor = {.poll_interval = std::chrono::milliseconds(poll_ms),
                      .heartbeat_timeout = std::chrono::milliseconds(heartbeat_ms)}};
}

class CommunicatorProbe : public torch::CustomClassHolder {
 public:
  CommunicatorProbe(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::int64_t timeout_ms, std::int64_t poll_ms,
                    std::int64_t heartbeat_ms)
      : communicator_(
            translated([&] { return make_c10d_communicator(group, to_options(timeout_ms, poll_ms, heartbeat_ms)); })) {}

  /// Begins to send one flat tensor of bytes to each rank, and to receive so many from each; with stamps in the
  /// messages' tails, or apart.
  void start(std::int64_t kind, std::int64_t step, std::int64_t unit, const std::vector<at::Tensor>& pieces,
             const std::vector<std::int64_t>& receive_nbytes, bool apart) {
    translated([&] {
      std::vector<std::int64_t> send_nbytes;
      for (const at::Tensor& piece : pieces) {
        send_nbytes.push_back(piece.numel());
      }
      const at::Device device = pieces.front().device();
      const auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
      const ExchangeLayout send_layout(communicator_->rank(), send_nbytes);
      receive_layout_.emplace(communicator_->rank(), receive_nbytes);
      const at::Tensor send = at::empty({send_layout.total_nbytes()}, bytes);
      received_ = at::empty({receive_layout_->total_nbytes()}, bytes);
      for (int rank = 0; rank < communicator_->world_size(); ++rank) {
        if (rank != communicator_->rank()) {
          payload_view(send, send_layout, rank).copy_(pieces[static_cast<std::size_t>(rank)]);
        }
      }
      const Label label{static_cast<OperationKind>(kind), static_cast<std::uint32_t>(step),
                        static_cast<std::int32_t>(unit)};
      ExchangeBuffers buffers{.send = message_views(send, send_layout),
                              .receive = message_views(received_, *receive_layout_),
                              .device = device};
      if (apart) {
        buffers.stamps = StampPlace::kApart;
        for (int rank = 0; rank < communicator_->world_size(); ++rank) {
          buffers.send[static_cast<std::size_t>(rank)] = payload_view(send, send_layout, rank);
          buffers.receive[static_cast<std::size_t>(rank)] = payload_view(received_, *receive_layout_, rank);
        }
      }
      pending_ = communicator_->exchange(label, std::move(buffers));
    });
  }

  /// What came from each rank.
  std::vector<at::Tensor> wait() {
    return translated([&] {
      pending_->wait();
      std::vector<at::Tensor> pieces;
      for (int rank = 0; rank < communicator_->world_size(); ++rank) {
        pieces.push_back(payload_view(received_, *receive_layout_, rank));
      }
      return pieces;
    });
  }

  /// Whether a stamp was wrong; reads the device.
  [[nodiscard]] bool mismatch() const { return pending_->mismatch().defined() && pending_->mismatch().item<bool>(); }

  [[nodiscard]] std::vector<std::int64_t> sum(std::vector<std::int64_t> values) {
    translated([&] { communicator_->sum(values); });
    return values;
  }
  void broadcast(const at::Tensor& tensor, std::int64_t root) {
    translated([&] { communicator_->broadcast(tensor, static_cast<int>(root)); });
  }
  void agree(const std::string& name, const std::string& value) {
    translated([&] { communicator_->agree(name, value); });
  }
  void report_failure(const std::string& message) { communicator_->report_failure(message); }
  void check() {
    translated([&] { communicator_->check(); });
  }
  /// Payload and overhead, by kind.
  [[nodiscard]] std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>> wire_bytes() const {
    const WireBytes wire = communicator_->wire_bytes();
    return {{wire.payload.begin(), wire.payload.end()}, {wire.overhead.begin(), wire.overhead.end()}};
  }
  void close() { communicator_->close(); }

 private:
  std::unique_ptr<Communicator> communicator_;
  std::optional<ExchangeLayout> receive_layout_;
  at::Tensor received_;
  std::unique_ptr<PendingExchange> pending_;
};

}  // namespace

void define_comm_probe(torch::Library& library) {
  library.class_<CommunicatorProbe>("CommunicatorProbe")
      .def(torch::init<const c10::intrusive_ptr<c10d::ProcessGroup>&, std::int64_t, std::int64_t, std::int64_t>())
      .def("start", &CommunicatorProbe::start)
      .def("wait", &CommunicatorProbe::wait)
      .def("mismatch", &CommunicatorProbe::mismatch)
      .def("sum", &CommunicatorProbe::sum)
      .def("broadcast", &CommunicatorProbe::broadcast)
      .def("agree", &CommunicatorProbe::agree)
      .def("report_failure", &CommunicatorProbe::report_failure)
      .def("check", &CommunicatorProbe::check)
      .def("wire_bytes", &CommunicatorProbe::wire_bytes)
      .def("close", &CommunicatorProbe::close);
}

}  // namespace pannier::binding
