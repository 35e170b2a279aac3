#include <algorithm>
#include <vector>

#include "pannier/device/compute.h"
#include "pannier/device/gradient_judge.h"

namespace pannier {
namespace {

class CpuJudge final : public GradientJudge {
 public:
  void reset() override {
    stats_ = {};
    verdict_ = {};
  }

  void add(const std::vector<GradientRun>& runs) override {
    for (const GradientRun& run : runs) {
      add_stats(kernels::gradient_stats(run.data, run.type, run.numel, torch_parallel_for()), run.parameter);
    }
  }

  void add_stats(const kernels::GradientStats& stats, int parameter) override {
    stats_.sum_of_squares.add(stats.sum_of_squares);
    stats_.num_nonfinite += stats.num_nonfinite;
    int& first = verdict_.first_nonfinite_parameter;
    if (stats.num_nonfinite > 0 && (first < 0 || parameter < first)) {
      first = parameter;
    }
  }

  void exchange(const std::function<void(std::span<std::int64_t>)>& exchange) override {
    const auto limbs = stats_.sum_of_squares.limbs();
    std::vector<std::int64_t> numbers(limbs.begin(), limbs.end());
    numbers.push_back(stats_.num_nonfinite);
    exchange(numbers);
    std::copy_n(numbers.begin(), limbs.size(), limbs.begin());
    stats_.num_nonfinite = numbers.back();
  }

  void decide(const kernels::DecisionInputs& inputs) override { verdict_.decision = kernels::decide(stats_, inputs); }
  [[nodiscard]] kernels::UpdateControl control() const override {
    return {&verdict_.decision.grad_factor, &verdict_.decision.skip};
  }
  [[nodiscard]] Verdict verdict() override { return verdict_; }

 private:
  kernels::GradientStats stats_;
  Verdict verdict_;
};

}  // namespace

std::unique_ptr<GradientJudge> make_cpu_judge() { return std::make_unique<CpuJudge>(); }

}  // namespace pannier
