// A communicator for engines of a test whose ranks are threads: it passes on to the one that the group keeps.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pannier/comm/communicator.h"

namespace pannier::testing {

/// A rank's communicator, which its group keeps.
class Borrowed final : public Communicator {
 public:
  explicit Borrowed(Communicator& own) : own_(own) {}
  [[nodiscard]] int rank() const noexcept override { return own_.rank(); }
  [[nodiscard]] int world_size() const noexcept override { return own_.world_size(); }
  [[nodiscard]] std::unique_ptr<PendingExchange> exchange(const Label& label, ExchangeBuffers buffers) override {
    return own_.exchange(label, std::move(buffers));
  }
  void sum(std::span<std::int64_t> values) override { own_.sum(values); }
  void broadcast(const at::Tensor& tensor, int root) override { own_.broadcast(tensor, root); }
  void agree(const std::string& name, const std::string& value) override { own_.agree(name, value); }
  [[nodiscard]] std::vector<std::string> share_texts(const std::string& name, const std::string& text) override {
    return own_.share_texts(name, text);
  }
  [[nodiscard]] std::unique_ptr<TextChannel> open_channel(const std::string& name) override {
    return own_.open_channel(name);
  }
  void report_failure(const std::string& message) override { own_.report_failure(message); }
  void check() override { own_.check(); }
  void explain_failures(std::function<std::string(const std::string& message)> explain) override {
    own_.explain_failures(std::move(explain));
  }
  [[nodiscard]] WireBytes wire_bytes() const override { return own_.wire_bytes(); }
  void close() override { own_.close(); }

 private:
  Communicator& own_;
};

}  // namespace pannier::testing
