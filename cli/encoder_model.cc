#include "cli/encoder_model.h"

#include <torch/nn/modules/transformerlayer.h>

namespace pannier::cli {

void add_model_flags(CLI::App& command, EncoderSize& size, const CLI::Validator& vocabulary) {
  const auto add = [&command](const char* flag, std::int64_t& value, const CLI::Validator& check) {
    command.add_option(flag, value)->check(check)->capture_default_str();
  };
  add("--vocabulary", size.vocabulary, vocabulary);
  add("--width", size.width, CLI::PositiveNumber);
  add("--layers", size.layers, CLI::PositiveNumber);
  add("--feed-forward", size.feed_forward, CLI::PositiveNumber);
}

EncoderModelImpl::EncoderModelImpl(const EncoderSize& size)
    : embed_(register_module("embed", torch::nn::Embedding(size.vocabulary, size.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      head_(register_module("head", torch::nn::Linear(size.width, size.vocabulary))) {
  for (std::int64_t i = 0; i < size.layers; ++i) {
    blocks_->push_back(torch::nn::TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(size.width, size.heads).dim_feedforward(size.feed_forward)));
  }
}

at::Tensor EncoderModelImpl::forward(const at::Tensor& tokens) {
  at::Tensor x = embed_(tokens).transpose(0, 1);  // The layers want (sequence, batch, width).
  for (const auto& block : *blocks_) {
    x = block->as<torch::nn::TransformerEncoderLayer>()->forward(x);
  }
  return head_(x.mean(0));
}

}  // namespace pannier::cli
