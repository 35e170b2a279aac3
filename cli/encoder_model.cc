#include "cli/encoder_model.h"

#include <torch/nn/modules/transformerlayer.h>

namespace pannier::cli {

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
