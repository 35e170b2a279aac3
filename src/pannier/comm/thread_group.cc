#include "pannier/comm/thread_group.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/comm/group_communicator.h"
#include "pannier/comm/mailbox.h"

namespace pannier {
namespace {

using Mailboxes = std::vector<std::shared_ptr<Mailbox>>;  // Shared by all ranks.

std::int64_t nbytes_of(const at::Tensor& message) { return message.defined() ? message.numel() : 0; }

class ThreadTransfer final : public Transfer {
 public:
  ThreadTransfer(std::shared_ptr<Mailbox> mailbox, Operation operation, int rank)
      : mailbox_(std::move(mailbox)), operation_(std::move(operation)), rank_(rank) {}

  [[nodiscard]] bool ready() const override {
    for (int source = 0; source < world_size(); ++source) {
      if (source != rank_ && !mailbox_->has(operation_.sequence, source)) {
        return false;
      }
    }
    return true;
  }

  [[nodiscard]] std::string finish() override {
    std::string wrong;
    const ExchangeBuffers buffers = std::move(operation_.buffers);
    for (int source = 0; source < static_cast<int>(buffers.receive.size()); ++source) {
      if (source == rank_) {
        continue;
      }
      const Letter letter = mailbox_->take(operation_.sequence, source);
      const at::Tensor& message = buffers.receive[static_cast<std::size_t>(source)];
      const MessageHeader expected{make_stamp(operation_.label, source, operation_.sequence), nbytes_of(message)};
      const std::string different = difference(expected, letter.header, rank_);
      if (!different.empty()) {
        wrong = wrong.empty() ? different : wrong;
      } else if (expected.nbytes > 0) {
        std::memcpy(message.data_ptr(), letter.bytes.data(), letter.bytes.size());
      }
    }
    return wrong;
  }

 private:
  [[nodiscard]] int world_size() const { return static_cast<int>(operation_.buffers.receive.size()); }

  std::shared_ptr<Mailbox> mailbox_;
  Operation operation_;
  int rank_;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(Mailboxes mailboxes, int rank) : mailboxes_(std::move(mailboxes)), rank_(rank) {}

  [[nodiscard]] std::shared_ptr<Transfer> start(Operation operation) override {
    for (std::size_t other = 0; other < mailboxes_.size(); ++other) {
      if (static_cast<int>(other) != rank_) {
        const at::Tensor& message = operation.buffers.send[other];
        Letter letter{.header = {make_stamp(operation.label, rank_, operation.sequence), nbytes_of(message)},
                      .bytes = std::vector<std::byte>(static_cast<std::size_t>(nbytes_of(message)))};
        if (!letter.bytes.empty()) {
          std::memcpy(letter.bytes.data(), message.const_data_ptr(), letter.bytes.size());
        }
        mailboxes_[other]->post(operation.sequence, rank_, std::move(letter));
      }
    }
    return std::make_shared<ThreadTransfer>(mailboxes_[static_cast<std::size_t>(rank_)], std::move(operation), rank_);
  }
  [[nodiscard]] std::int64_t header_nbytes() const noexcept override { return 0; }
  void abort() noexcept override {}
  void close() noexcept override {}

 private:
  Mailboxes mailboxes_;
  int rank_;
};

}  // namespace

GroupOptions thread_group_options() {
  GroupOptions options;
  options.monitor.poll_interval = std::chrono::milliseconds(5);
  return options;
}

ThreadGroup::ThreadGroup(int world_size, const GroupOptions& options) {
  PANNIER_CHECK(world_size > 0, fmt::format("a group of {} ranks", world_size));
  options.validate();
  Mailboxes mailboxes;
  std::vector<std::shared_ptr<GroupState>> states;
  for (int rank = 0; rank < world_size; ++rank) {
    states.push_back(std::make_shared<GroupState>());
    mailboxes.push_back(std::make_shared<Mailbox>(states.back()));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    const auto& state = states[static_cast<std::size_t>(rank)];
    communicators_.push_back(std::make_unique<GroupCommunicator>(
        GroupParts{.rank = rank,
                   .world_size = world_size,
                   .state = state,
                   .monitor = std::make_shared<Monitor>(store_.clone(), state, rank, world_size, options.monitor),
                   .store = store_.clone(),
                   .host = std::make_shared<ThreadTransport>(mailboxes, rank),
                   .device = nullptr,
                   .staging_device = std::nullopt,
                   .collective_timeout = options.collective_timeout}));
  }
}

ThreadGroup::~ThreadGroup() {
  for (const auto& communicator : communicators_) {
    communicator->close();
  }
}

}  // namespace pannier
