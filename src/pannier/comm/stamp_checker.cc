#include "pannier/comm/stamp_checker.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>

#include <cstring>

#include "pannier/comm/exchange_layout.h"

namespace pannier {
namespace {

// A stamp's first word without the source, which the transport knows anyway: so one number fits all messages.
constexpr std::int64_t kWithoutSource = ~(std::int64_t{0xffff} << 16);

at::Tensor tail_words(const at::Tensor& message) {
  return message.slice(0, message.numel() - kStampNbytes).view(at::kLong);
}

class TorchStampChecker final : public StampChecker {
 public:
  void write(const at::Tensor& message, const Stamp& stamp) override {
    const at::Tensor words = tail_words(message);
    words[0].fill_(stamp.words()[0]);
    words[1].fill_(stamp.words()[1]);
  }

  [[nodiscard]] at::Tensor check(const std::vector<StampedMessage>& messages) override {
    std::vector<at::Tensor> tails;
    for (const StampedMessage& message : messages) {
      tails.push_back(tail_words(message.message));
    }
    const auto expected = messages.front().expected.words();
    const at::Tensor words = at::stack(tails);
    const at::Tensor first = words.select(1, 0).bitwise_and(kWithoutSource).ne(expected[0] & kWithoutSource);
    return first.logical_or_(words.select(1, 1).ne(expected[1])).any().reshape({1});
  }
};

}  // namespace

std::unique_ptr<StampChecker> make_torch_stamp_checker() { return std::make_unique<TorchStampChecker>(); }

void write_stamp(const at::Tensor& message, const Stamp& stamp) {
  std::memcpy(static_cast<char*>(message.data_ptr()) + message.numel() - kStampNbytes, &stamp, sizeof stamp);
}

Stamp read_stamp(const at::Tensor& message) {
  Stamp stamp;
  std::memcpy(&stamp, static_cast<const char*>(message.const_data_ptr()) + message.numel() - kStampNbytes,
              sizeof stamp);
  return stamp;
}

}  // namespace pannier
