#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"
#include "pannier/kernels/cuda/update.h"
#include "pannier/kernels/reference.h"
#include "tests/kernels/cuda_arena.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

namespace cuda = kernels::cuda;
using kernels::make_coefficients;
using kernels::UpdateBuffers;
using kernels::UpdateTask;

constexpr float kFactor = 0.37F;

// Where the buffers of one run lie in an arena.
struct RunPlace {
  UpdateBuffers shape;
  std::size_t param, rest, state1, state2, grad;

  // The buffers in an arena that begins at `base`.
  [[nodiscard]] UpdateBuffers at(unsigned char* base) const {
    UpdateBuffers b = shape;
    b.param = base + param;
    b.rest = shape.rest != nullptr ? base + rest : nullptr;
    b.state1 = shape.state1 != nullptr ? reinterpret_cast<float*>(base + state1) : nullptr;
    b.state2 = shape.state2 != nullptr ? reinterpret_cast<float*>(base + state2) : nullptr;
    b.grad = base + grad;
    return b;
  }
};

// Runs of all sizes; of three, one has every buffer at odd addresses and one has only its gradient there.
struct Runs {
  Runs(const Rule& rule, Storage storage, const std::vector<std::int64_t>& sizes, std::uint32_t seed) : arena(seed) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const RunBuffers run(rule, storage, sizes[i], random);
      const std::size_t all = i % 3 == 1 ? 1 : 0;
      const std::size_t grad_too = i % 3 == 2 ? 1 : all;
      RunPlace place{};
      place.shape = run.buffers();
      place.param = append(run.param, all * (storage.format == StateFormat::kFp32 ? 4 : 2));
      place.rest = append(run.rest, all * (storage.format == StateFormat::kFp16 ? 4 : 2));
      place.state1 = append(run.state1, all * 4);
      place.state2 = append(run.state2, all * 4);
      place.grad = append(run.grad, grad_too * grad_nbytes(storage.grad_type));
      places.push_back(place);
    }
    arena.close();
  }

  std::size_t append(const FencedBuffer& buffer, std::size_t misalignment) {
    return arena.append(buffer.as<char>(), buffer.nbytes(), misalignment);
  }

  // Every run with constants of its own.
  [[nodiscard]] std::vector<UpdateTask> tasks(const Rule& rule, std::int64_t step, float factor,
                                              unsigned char* base) const {
    std::vector<UpdateTask> all;
    for (std::size_t i = 0; i < places.size(); ++i) {
      const auto run_step = step + static_cast<std::int64_t>(i % 5);
      all.push_back({make_coefficients(rule.algorithm, rule.hyper, run_step, factor), places[i].at(base)});
    }
    return all;
  }

  Arena arena;
  std::vector<RunPlace> places;
};

void update_on_device(const Rule& rule, Storage storage, const std::vector<UpdateTask>& tasks,
                      const kernels::UpdateControl& control) {
  const auto batch = cuda::make_update_batch(rule.algorithm, storage.format, tasks);
  const DeviceArray<cuda::UpdateRun> runs(batch.runs);
  cuda::update(batch, runs.data(), control, nullptr);
  require_cuda(cudaDeviceSynchronize());
}

void expect_same_as_reference(const Rule& rule, Storage storage, const std::vector<std::int64_t>& sizes,
                              std::uint32_t seed) {
  SCOPED_TRACE(fmt::format("{}, format {}, grad type {}", rule.name, static_cast<int>(storage.format),
                           static_cast<int>(storage.grad_type)));
  Runs runs(rule, storage, sizes, seed);
  auto& expected = runs.arena.bytes();
  const DeviceArray<unsigned char> device(expected);
  for (const std::int64_t step : {1, 2}) {
    update_on_device(rule, storage, runs.tasks(rule, step, kFactor, device.data()), {});
    for (const auto& task : runs.tasks(rule, step, kFactor, expected.data())) {
      kernels::reference::update(rule.algorithm, storage.format, task.coefficients, task.buffers);
    }
  }
  ASSERT_TRUE(device.read() == expected);
}

class CudaUpdate : public CudaTest, public ::testing::WithParamInterface<Rule> {};

TEST_P(CudaUpdate, MatchesReferenceBitForBit) {
  std::uint32_t seed = 1;
  for (const auto storage : all_storages()) {
    expect_same_as_reference(GetParam(), storage, cuda_sizes(), ++seed);
  }
}

TEST_P(CudaUpdate, MatchesReferenceOverMillions) {
  const std::vector<std::int64_t> sizes = {3, (std::int64_t{1} << 20) + 77, 1, std::int64_t{2} << 20};
  expect_same_as_reference(GetParam(), {StateFormat::kBf16, GradType::kBf16}, sizes, 11);
}

TEST_P(CudaUpdate, TakesFactorAndSkipFromTheDevice) {
  const Storage storage{StateFormat::kBf16, GradType::kFp32};
  Runs runs(GetParam(), storage, {70, 5000}, 3);
  auto& expected = runs.arena.bytes();
  const DeviceArray<unsigned char> device(expected);
  const DeviceArray<float> factor(std::vector<float>{kFactor});
  const DeviceArray<std::uint32_t> skip(std::vector<std::uint32_t>{1, 0});
  const auto tasks = runs.tasks(GetParam(), 1, 123.0F, device.data());
  update_on_device(GetParam(), storage, tasks, {factor.data(), skip.data()});
  EXPECT_TRUE(device.read() == expected) << "a skipped update changes nothing";
  update_on_device(GetParam(), storage, tasks, {factor.data(), skip.data() + 1});
  for (const auto& task : runs.tasks(GetParam(), 1, kFactor, expected.data())) {
    kernels::reference::update(GetParam().algorithm, storage.format, task.coefficients, task.buffers);
  }
  EXPECT_TRUE(device.read() == expected);
}

INSTANTIATE_TEST_SUITE_P(AllRules, CudaUpdate, ::testing::ValuesIn(all_rules()),
                         [](const auto& rule) { return rule.param.name; });

TEST(CudaUpdateBatch, RefusesWhatCannotOccur) {
  float x = 0;
  UpdateTask task;
  task.buffers = {&x, &x, &x, &x, &x, GradType::kFp32, 1};
  const auto make = [](StateFormat format, const std::vector<UpdateTask>& tasks) {
    return cuda::make_update_batch(Algorithm::kAdamW, format, tasks);
  };
  EXPECT_EQ(make(StateFormat::kBf16, {task, task}).num_blocks, 2);
  UpdateTask other = task;
  other.buffers.grad_type = GradType::kFp16;
  EXPECT_THROW(static_cast<void>(make(StateFormat::kBf16, {other})), InternalError);
  EXPECT_THROW(static_cast<void>(make(StateFormat::kFp32, {task, other})), InternalError);
  other.buffers.grad_type = GradType::kBf16;
  EXPECT_THROW(static_cast<void>(make(StateFormat::kFp16, {other})), InternalError);
  task.buffers.state2 = nullptr;
  EXPECT_THROW(static_cast<void>(make(StateFormat::kFp32, {task})), InternalError);
}

}  // namespace
}  // namespace pannier::testing
