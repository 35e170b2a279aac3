#include "pannier/comm/communicator.h"

namespace pannier {
namespace {

class CompleteExchange final : public PendingExchange {
 public:
  void wait() override {}
};

class SoloChannel final : public TextChannel {
 public:
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& /*name*/, const std::string& text) override {
    return {text};
  }
};

class SoloCommunicator final : public Communicator {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int world_size() const noexcept override { return 1; }
  [[nodiscard]] std::unique_ptr<PendingExchange> exchange(const Label& /*label*/,
                                                          ExchangeBuffers /*buffers*/) override {
    return std::make_unique<CompleteExchange>();
  }
  void sum(std::span<std::int64_t> /*values*/) override {}
  void broadcast(const at::Tensor& /*tensor*/, int /*root*/) override {}
  void agree(const std::string& /*name*/, const std::string& /*value*/) override {}
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& /*name*/, const std::string& text) override {
    return {text};
  }
  [[nodiscard]] std::unique_ptr<TextChannel> open_channel(const std::string& /*name*/) override {
    return std::make_unique<SoloChannel>();
  }
  void report_failure(const std::string& /*message*/) override {}
  void check() override {}
  void explain_failures(std::function<std::string(const std::string&)> /*explain*/) override {}
  [[nodiscard]] WireBytes wire_bytes() const override { return {}; }
  void close() override {}
};

}  // namespace

std::unique_ptr<Communicator> make_solo_communicator() { return std::make_unique<SoloCommunicator>(); }

}  // namespace pannier
