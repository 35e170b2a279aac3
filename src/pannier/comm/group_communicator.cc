#include "pannier/comm/group_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"
#include "pannier/comm/group_channel.h"

namespace pannier {
namespace {

constexpr std::int64_t kBroadcastChunkNbytes = std::int64_t{4} << 20;

bool is_message(const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }

at::Tensor empty_bytes(std::int64_t nbytes, at::Device device) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

std::vector<at::Tensor> message_views(const at::Tensor& flat, const ExchangeLayout& layout) {
  PANNIER_CHECK(flat.numel() >= layout.total_nbytes(),
                fmt::format("a buffer of {} bytes is too small for {}", flat.numel(), layout.total_nbytes()));
  std::vector<at::Tensor> views;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    views.push_back(flat.narrow(0, layout.offset(rank), layout.message_nbytes(rank)));
  }
  return views;
}

at::Tensor payload_view(const at::Tensor& flat, const ExchangeLayout& layout, int rank) {
  return flat.narrow(0, layout.offset(rank), layout.payload_nbytes(rank));
}

void GroupOptions::validate() const {
  if (collective_timeout.count() <= 0 || monitor.poll_interval.count() <= 0 || monitor.heartbeat_timeout.count() <= 0) {
    throw ConfigError(
        fmt::format("times must be positive: collective_timeout {} ms, poll_interval {} ms, "
                    "heartbeat_timeout {} ms",
                    collective_timeout.count(), monitor.poll_interval.count(), monitor.heartbeat_timeout.count()));
  }
}

/// One exchange as its caller sees it.
class GroupCommunicator::Pending final : public PendingExchange {
 public:
  /// `stamped` are the messages that came with a stamp in their tail, by source.
  Pending(GroupCommunicator& group, const Operation& operation, std::vector<std::shared_ptr<Transfer>> transfers,
          std::vector<at::Tensor> stamped)
      : group_(group),
        sequence_(operation.sequence),
        label_(operation.label),
        is_host_(operation.buffers.device.is_cpu()),
        transfers_(std::move(transfers)),
        stamped_(std::move(stamped)) {}

  void wait() override {
    if (std::exchange(is_waited_for_, true)) {
      return;
    }
    if (is_host_) {
      group_.wait_for_host(*transfers_.front(), sequence_, label_);
    } else {
      group_.require_usable(describe(label_));
    }
    std::string wrong;
    for (const auto& transfer : transfers_) {
      wrong += transfer->finish();
    }
    const std::vector<StampedMessage> messages = stamped_messages();
    stamped_.clear();
    if (!is_host_) {
      mismatch_ = messages.empty() ? at::Tensor() : group_.device_stamps_->check(messages);
      return;
    }
    for (const StampedMessage& it : messages) {
      if (wrong.empty()) {
        wrong =
            difference({it.expected, it.message.numel()}, {read_stamp(it.message), it.message.numel()}, group_.rank());
      }
    }
    if (!wrong.empty()) {
      group_.parts_.monitor->report_mismatch(wrong);
      group_.end_with(describe(label_), wrong);
    }
  }

  [[nodiscard]] at::Tensor mismatch() const override { return mismatch_; }

 private:
  [[nodiscard]] std::vector<StampedMessage> stamped_messages() const {
    std::vector<StampedMessage> messages;
    for (std::size_t source = 0; source < stamped_.size(); ++source) {
      const int rank = static_cast<int>(source);
      if (rank != group_.rank() && is_message(stamped_[source])) {
        messages.push_back({stamped_[source], make_stamp(label_, rank, sequence_)});
      }
    }
    return messages;
  }

  GroupCommunicator& group_;
  std::uint32_t sequence_;
  Label label_;
  bool is_host_;
  std::vector<std::shared_ptr<Transfer>> transfers_;  ///< Shared with the transport's thread.
  std::vector<at::Tensor> stamped_;
  bool is_waited_for_ = false;
  at::Tensor mismatch_;
};

GroupCommunicator::GroupCommunicator(GroupParts parts)
    : parts_(std::move(parts)),
      agreement_(std::move(parts_.store), parts_.state, parts_.rank, parts_.world_size, parts_.collective_timeout),
      device_stamps_(make_torch_stamp_checker()),
      process_(getpid()) {
  parts_.state->on_failure([host = parts_.host, device = parts_.device] {
    for (const auto& transport : {host, device}) {
      if (transport) {
        transport->abort();
      }
    }
  });
}

GroupCommunicator::~GroupCommunicator() {
  if (getpid() == process_ && !is_closed_) {
    parts_.state->drop_handler();
    for (const auto& transport : {parts_.host, parts_.device}) {
      if (transport) {
        transport->abort();
      }
    }
  }
}

void GroupCommunicator::require_usable(const std::string& operation) const {
  PANNIER_CHECK(getpid() == process_, operation + " in a forked child, which has no part in its parent's group");
  PANNIER_CHECK(!is_closed_, operation + " after the group was closed");
  parts_.state->throw_if_failed(operation);
}

std::unique_ptr<PendingExchange> GroupCommunicator::exchange(const Label& label, ExchangeBuffers buffers) {
  require_usable(describe(label));
  const bool is_host = buffers.device.is_cpu();
  const auto& transport = is_host ? parts_.host : parts_.device;
  PANNIER_CHECK(transport != nullptr, fmt::format("{}: this group has nothing that carries messages on {}",
                                                  describe(label), buffers.device.str()));
  check_messages(label, buffers, buffers.send, "to");
  check_messages(label, buffers, buffers.receive, "from");
  const Operation operation{.sequence = sequence_++, .label = label, .buffers = std::move(buffers)};
  parts_.monitor->reached(operation.sequence, label);
  try {
    stamp_and_count(operation, *transport);
    std::vector<at::Tensor> stamped;
    if (operation.buffers.stamps == StampPlace::kTail) {
      stamped = operation.buffers.receive;
    }
    std::vector<std::shared_ptr<Transfer>> transfers{transport->start(operation)};
    if (const auto apart = stamps_apart(operation)) {
      stamped = apart->buffers.receive;
      transfers.push_back(transport->start(*apart));
    }
    return std::make_unique<Pending>(*this, operation, std::move(transfers), std::move(stamped));
  } catch (const std::exception& error) {
    report_failure(fmt::format("{}: {}", describe(label), error.what()));
    end_with(describe(label), error.what());
  }
}

// In host memory every message has a header, which says all that a stamp does. On a device the stamps follow in an
// operation of their own, right behind the messages: what is paired wrongly there is paired wrongly here.
std::optional<Operation> GroupCommunicator::stamps_apart(const Operation& operation) const {
  const ExchangeBuffers& buffers = operation.buffers;
  if (buffers.stamps == StampPlace::kTail || buffers.device.is_cpu()) {
    return std::nullopt;
  }
  const at::Tensor own = empty_bytes(kStampNbytes, buffers.device);
  device_stamps_->write(own, make_stamp(operation.label, parts_.rank, operation.sequence));
  const at::Tensor others = empty_bytes(kStampNbytes * parts_.world_size, buffers.device);
  Operation apart{.sequence = operation.sequence, .label = operation.label, .buffers = {.device = buffers.device}};
  for (std::size_t rank = 0; rank < buffers.send.size(); ++rank) {
    apart.buffers.send.push_back(is_message(buffers.send[rank]) ? own : at::Tensor());
    const auto offset = kStampNbytes * static_cast<std::int64_t>(rank);
    apart.buffers.receive.push_back(is_message(buffers.receive[rank]) ? others.narrow(0, offset, kStampNbytes)
                                                                      : at::Tensor());
  }
  return apart;
}

void GroupCommunicator::check_messages(const Label& label, const ExchangeBuffers& buffers,
                                       const std::vector<at::Tensor>& messages, const char* direction) const {
  PANNIER_CHECK(static_cast<int>(messages.size()) == parts_.world_size,
                fmt::format("{}: {} messages for {} ranks", describe(label), messages.size(), parts_.world_size));
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    const at::Tensor& message = messages[rank];
    if (static_cast<int>(rank) == parts_.rank || !is_message(message)) {
      continue;
    }
    const bool is_run = message.scalar_type() == at::kByte && message.device() == buffers.device &&
                        message.dim() == 1 && message.is_contiguous();
    const bool has_tail = message.numel() > kStampNbytes && message.numel() % kMessageAlignment == 0 &&
                          message.storage_offset() % kMessageAlignment == 0;
    PANNIER_CHECK(
        is_run && (has_tail || buffers.stamps == StampPlace::kApart),
        fmt::format("{}: the message {} rank {} is no run of bytes with room for a stamp: {} of {} on {} at {}",
                    describe(label), direction, rank, message.numel(), message.toString(), message.device().str(),
                    message.storage_offset()));
  }
}

void GroupCommunicator::stamp_and_count(const Operation& operation, const Transport& transport) {
  const Stamp stamp = make_stamp(operation.label, parts_.rank, operation.sequence);
  const auto kind = static_cast<std::size_t>(operation.label.kind);
  const bool is_host = operation.buffers.device.is_cpu();
  const bool has_tail = operation.buffers.stamps == StampPlace::kTail;
  const void* stamped = nullptr;
  for (int rank = 0; rank < parts_.world_size; ++rank) {
    if (rank == parts_.rank) {
      continue;
    }
    wire_bytes_.overhead[kind] += transport.header_nbytes();
    const at::Tensor& message = operation.buffers.send[static_cast<std::size_t>(rank)];
    if (!is_message(message)) {
      continue;
    }
    wire_bytes_.payload[kind] += message.numel() - (has_tail ? kStampNbytes : 0);
    wire_bytes_.overhead[kind] += has_tail || !is_host ? kStampNbytes : 0;
    const void* end = static_cast<const char*>(message.const_data_ptr()) + message.numel();
    if (!has_tail || std::exchange(stamped, end) == end) {
      continue;  // One piece for all is stamped once.
    }
    if (is_host) {
      write_stamp(message, stamp);
    } else {
      device_stamps_->write(message, stamp);
    }
  }
}

void GroupCommunicator::wait_for_host(Transfer& transfer, std::uint32_t sequence, const Label& label) {
  const std::string operation = describe(label);
  require_usable(operation);
  const auto deadline = GroupState::Clock::now() + parts_.collective_timeout;
  switch (parts_.state->wait(deadline, [&transfer] { return transfer.ready(); })) {
    case GroupState::Outcome::kReady:
      return;
    case GroupState::Outcome::kFailed:
      parts_.state->throw_if_failed(operation);
      break;
    case GroupState::Outcome::kDeadline:
      const double seconds = std::chrono::duration<double>(parts_.collective_timeout).count();
      parts_.monitor->report_overdue(sequence, label, seconds);
      end_with(operation, fmt::format("not complete after {:g} s, and the store does not answer", seconds));
  }
}

void GroupCommunicator::end_with(const std::string& operation, const std::string& otherwise) {
  parts_.monitor->wait_until_failed(otherwise);
  parts_.state->throw_if_failed(operation);
  throw CollectiveError(fmt::format("{}: {}", operation, otherwise));
}

void GroupCommunicator::sum(std::span<std::int64_t> values) {
  const Label label{.kind = OperationKind::kVotes, .step = num_sums_++};
  const at::Device device = parts_.host ? at::Device(at::kCPU) : parts_.staging_device.value();
  const auto nbytes = static_cast<std::int64_t>(values.size_bytes());
  const ExchangeLayout layout(parts_.rank,
                              std::vector<std::int64_t>(static_cast<std::size_t>(parts_.world_size), nbytes));
  const at::Tensor mine = empty_bytes(message_nbytes(nbytes), device);
  const at::Tensor theirs = empty_bytes(layout.total_nbytes(), device);
  const auto own = at::from_blob(values.data(), {nbytes}, at::kByte);
  mine.narrow(0, 0, nbytes).copy_(own);
  const auto pending =
      exchange(label, {.send = std::vector<at::Tensor>(static_cast<std::size_t>(parts_.world_size), mine),
                       .receive = message_views(theirs, layout),
                       .device = device});
  pending->wait();
  require_match(*pending, label);
  const at::Tensor came = theirs.cpu();
  for (int rank = 0; rank < parts_.world_size; ++rank) {
    if (rank != parts_.rank) {
      const auto* begin = reinterpret_cast<const std::int64_t*>(payload_view(came, layout, rank).const_data_ptr());
      // Unsigned, since limbs may wrap.
      std::transform(values.begin(), values.end(), begin, values.begin(), [](std::int64_t a, std::int64_t b) {
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
      });
    }
  }
}

// Reads the device's flag: for operations that block anyway.
void GroupCommunicator::require_match(const PendingExchange& pending, const Label& label) {
  const bool is_wrong = pending.mismatch().defined() && pending.mismatch().item<bool>();
  parts_.state->throw_if_failed(describe(label));
  if (is_wrong) {
    const std::string message =
        fmt::format("rank {} in {} got what was sent for another operation", parts_.rank, describe(label));
    parts_.monitor->report_mismatch(message);
    end_with(describe(label), message);
  }
}

void GroupCommunicator::broadcast(const at::Tensor& tensor, int root) {
  PANNIER_CHECK(tensor.is_non_overlapping_and_dense(), "a tensor with gaps cannot be broadcast");
  const auto nbytes = static_cast<std::int64_t>(tensor.nbytes());
  const at::Tensor bytes =
      at::from_blob(tensor.data_ptr(), {nbytes}, at::TensorOptions().dtype(at::kByte).device(tensor.device()));
  std::int64_t begin = 0;
  do {
    const std::int64_t size = std::min(kBroadcastChunkNbytes, nbytes - begin);
    broadcast_chunk(bytes.narrow(0, begin, size), root);
    begin += size;
  } while (begin < nbytes);
}

void GroupCommunicator::broadcast_chunk(const at::Tensor& chunk, int root) {
  const Label label{.kind = OperationKind::kOther, .unit = num_broadcasts_++};
  const bool stages = chunk.is_cpu() ? parts_.host == nullptr : parts_.device == nullptr;
  const at::Device device = stages ? parts_.staging_device.value_or(at::kCPU) : chunk.device();
  const at::Tensor message = empty_bytes(message_nbytes(chunk.numel()), device);
  ExchangeBuffers buffers{.send = std::vector<at::Tensor>(static_cast<std::size_t>(parts_.world_size)),
                          .receive = std::vector<at::Tensor>(static_cast<std::size_t>(parts_.world_size)),
                          .device = device};
  const bool is_root = parts_.rank == root;
  if (is_root) {
    message.narrow(0, 0, chunk.numel()).copy_(chunk);
    std::fill(buffers.send.begin(), buffers.send.end(), message);
  } else {
    buffers.receive.at(static_cast<std::size_t>(root)) = message;
  }
  const auto pending = exchange(label, std::move(buffers));
  pending->wait();
  require_match(*pending, label);
  if (!is_root) {
    chunk.copy_(message.narrow(0, 0, chunk.numel()));
  }
}

// Runs what goes through the store; where ranks lose each other there, the group has failed.
template <class Call>
auto GroupCommunicator::beside_collectives(const std::string& operation, const Call& call) -> decltype(call()) {
  require_usable(operation);
  try {
    return call();
  } catch (const CollectiveError& error) {
    if (!parts_.state->failure()) {
      parts_.monitor->report_mismatch(error.what());
      parts_.monitor->wait_until_failed(error.what());
    }
    throw;
  }
}

void GroupCommunicator::agree(const std::string& name, const std::string& value) {
  beside_collectives(fmt::format("comparing {} over ranks", name), [&] { agreement_.agree(name, value); });
}

std::vector<std::string> GroupCommunicator::share_texts(const std::string& name, const std::string& text) {
  return beside_collectives(fmt::format("sharing {} over ranks", name),
                            [&] { return agreement_.share_texts(name, text); });
}

std::unique_ptr<TextChannel> GroupCommunicator::open_channel(const std::string& name) {
  require_usable("opening a channel");
  return std::make_unique<GroupChannel>(agreement_.beside(name));
}

void GroupCommunicator::report_failure(const std::string& message) {
  if (getpid() == process_ && !is_closed_) {
    parts_.monitor->report_failure(message);
    parts_.monitor->wait_until_failed(fmt::format("rank {} failed: {}", parts_.rank, message));
  }
}

void GroupCommunicator::check() { require_usable("an operation of the group"); }

WireBytes GroupCommunicator::wire_bytes() const { return wire_bytes_; }

void GroupCommunicator::close() {
  if (getpid() != process_ || std::exchange(is_closed_, true)) {
    return;
  }
  parts_.state->drop_handler();
  for (const auto& transport : {parts_.host, parts_.device}) {
    if (transport) {
      transport->close();
    }
  }
  parts_.monitor->close();
}

}  // namespace pannier
