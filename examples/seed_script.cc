// Trains the same model as seed_script.py, from C++: an encoder with its optimizer states offloaded to host memory.
#include <pannier/engine/engine.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

struct BigModelImpl : torch::nn::Module {
  BigModelImpl(int64_t vocabulary, int64_t width, int64_t heads, int64_t layers)
      : embed(register_module("embed", torch::nn::Embedding(vocabulary, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(width, vocabulary))) {
    for (int64_t i = 0; i < layers; ++i) {
      blocks->push_back(torch::nn::TransformerEncoderLayer(width, heads));
    }
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embed(tokens).transpose(0, 1);
    for (const auto& block : *blocks) {
      x = block->as<torch::nn::TransformerEncoderLayer>()->forward(x);
    }
    return head(x.mean(0));
  }

  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(BigModel);

// Usage: seed_script [width [steps]]. Defaults: 1024 and 20, which makes about 95 million parameters.
int main(int argc, char** argv) {
  const int64_t width = argc > 1 ? std::atoll(argv[1]) : 1024;
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 20;
  const int64_t vocabulary = 30000;
  const int64_t batch = 8;
  const int64_t seq_len = 128;

  torch::manual_seed(42);
  BigModel model(vocabulary, width, 16, 4);
  const auto config = pannier::Config::from_text(R"({
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
    "fp16": {"enabled": true}
  })");
  const auto device = pannier::training_device(config);
  model->to(device);
  const auto engine = pannier::initialize(model, config);

  for (int64_t step = 0; step < steps; ++step) {
    const auto input_ids = torch::randint(0, vocabulary, {batch, seq_len}, torch::kLong).to(device);
    const auto labels = torch::randint(0, vocabulary, {batch}, torch::kLong).to(device);
    const auto loss = torch::nn::functional::cross_entropy(model->forward(input_ids), labels);
    engine->backward(loss);
    engine->step();
    if (step % 5 == 0) {
      std::cout << "step " << step << ", loss=" << loss.item<double>() << std::endl;
    }
  }
  std::cout << "peak device memory: " << static_cast<double>(engine->core().device().memory().peak) / (1 << 30)
            << " GiB\n";
  return 0;
}
