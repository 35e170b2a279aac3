#include <pannier/engine/engine.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

int main() {
  torch::nn::Linear model(4, 1);
  const auto engine = pannier::initialize(model, pannier::Config::from_text(R"({
    "train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})"));
  double first = 0;
  double last = 0;
  for (int i = 0; i < 20; ++i) {
    const at::Tensor loss = (model->forward(at::ones({2, 4})) - 1).pow(2).mean();
    engine->backward(loss);
    engine->step();
    last = loss.item<double>();
    first = i == 0 ? last : first;
  }
  std::cout << first << " -> " << last << '\n';
  return last < first * 1e-2 ? 0 : 1;
}
