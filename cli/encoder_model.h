// The model that `pannier train` trains: an embedding, transformer encoder layers, and a linear head on their mean,
// which predicts the token that follows a window of text.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <CLI/CLI.hpp>
#include <cstdint>

namespace pannier::cli {

/// The size of a model; the defaults make 95,069,488 parameters.
struct EncoderSize {
  std::int64_t vocabulary = 30000;
  std::int64_t width = 1024;
  std::int64_t layers = 4;
  std::int64_t heads = 16;
  std::int64_t feed_forward = 2048;
};

/// Adds the flags that decide a model's number of parameters, with the values in `size` as defaults. `size` must
/// outlive the parser's run.
void add_model_flags(CLI::App& command, EncoderSize& size, const CLI::Validator& vocabulary);

/// See the file comment. Input: (batch, sequence) token ids; output: (batch, vocabulary) logits.
class EncoderModelImpl : public torch::nn::Module {
 public:
  explicit EncoderModelImpl(const EncoderSize& size);
  [[nodiscard]] at::Tensor forward(const at::Tensor& tokens);

 private:
  torch::nn::Embedding embed_;
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_;
};
TORCH_MODULE(EncoderModel);

}  // namespace pannier::cli
