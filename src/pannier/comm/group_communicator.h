// A group of ranks over any transport: counts and stamps the operations, waits with a deadline, and turns what goes
// wrong into errors that name ranks.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "pannier/comm/agreement.h"
#include "pannier/comm/communicator.h"
#include "pannier/comm/group_options.h"
#include "pannier/comm/group_state.h"
#include "pannier/comm/monitor.h"
#include "pannier/comm/stamp_checker.h"
#include "pannier/comm/transport.h"

namespace pannier {

/// What a group is made of. Shared pointers, since threads that are stuck in a library may outlive the communicator.
struct GroupParts {
  int rank = 0;
  int world_size = 1;
  std::shared_ptr<GroupState> state;
  std::shared_ptr<Monitor> monitor;
  std::unique_ptr<KeyValueStore> store;      ///< For agree(); the monitor has its own clone.
  std::shared_ptr<Transport> host;           ///< For host memory; none where only a device can send.
  std::shared_ptr<Transport> device;         ///< For device memory; none in a group of CPUs.
  std::optional<at::Device> staging_device;  ///< Where host values travel through when there is no `host`.
  std::chrono::milliseconds collective_timeout{};
};

class GroupCommunicator final : public Communicator {
 public:
  explicit GroupCommunicator(GroupParts parts);
  ~GroupCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return parts_.rank; }
  [[nodiscard]] int world_size() const noexcept override { return parts_.world_size; }
  [[nodiscard]] std::unique_ptr<PendingExchange> exchange(const Label& label, ExchangeBuffers buffers) override;
  void sum(std::span<std::int64_t> values) override;
  void broadcast(const at::Tensor& tensor, int root) override;
  void agree(const std::string& name, const std::string& value) override;
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& name, const std::string& text) override;
  [[nodiscard]] std::unique_ptr<TextChannel> open_channel(const std::string& name) override;
  void report_failure(const std::string& message) override;
  void check() override;
  void explain_failures(std::function<std::string(const std::string&)> explain) override {
    parts_.state->explain_failures(std::move(explain));
  }
  [[nodiscard]] WireBytes wire_bytes() const override;
  void close() override;

 private:
  class Pending;

  void require_usable(const std::string& operation) const;
  void check_messages(const Label& label, const ExchangeBuffers& buffers, const std::vector<at::Tensor>& messages,
                      const char* direction) const;
  void stamp_and_count(const Operation& operation, const Transport& transport);
  [[nodiscard]] std::optional<Operation> stamps_apart(const Operation& operation) const;
  void wait_for_host(Transfer& transfer, std::uint32_t sequence, const Label& label);
  [[noreturn]] void end_with(const std::string& operation, const std::string& otherwise);
  void require_match(const PendingExchange& pending, const Label& label);
  template <class Call>
  auto beside_collectives(const std::string& operation, const Call& call) -> decltype(call());
  void broadcast_chunk(const at::Tensor& chunk, int root);

  GroupParts parts_;
  Agreement agreement_;
  std::unique_ptr<StampChecker> device_stamps_;
  std::uint32_t sequence_ = 0;
  std::uint32_t num_sums_ = 0;
  std::int32_t num_broadcasts_ = 0;
  WireBytes wire_bytes_;
  int process_;
  bool is_closed_ = false;
};

}  // namespace pannier
