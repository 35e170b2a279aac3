#include "pannier/kernels/update.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cfenv>

#include "pannier/base/error.h"
#include "pannier/base/thread_team.h"
#include "pannier/kernels/reference.h"
#include "tests/kernels/hostile_float_modes.h"
#include "tests/kernels/run_buffers.h"

namespace pannier::testing {
namespace {

using kernels::available_targets;
using kernels::make_coefficients;
using kernels::update;
using kernels::update_all;
using kernels::UpdateCoefficients;
using kernels::UpdateTask;

constexpr float kFactor = 0.37F;

std::vector<std::int64_t> all_sizes() {
  std::vector<std::int64_t> sizes;
  for (std::int64_t numel = 0; numel <= 70; ++numel) {
    sizes.push_back(numel);
  }
  sizes.insert(sizes.end(), {1023, 1025, 4096 + 17, 30011});
  return sizes;
}

class UpdateKernels : public ::testing::TestWithParam<Rule> {};

TEST_P(UpdateKernels, MatchReferenceBitForBit) {
  std::mt19937 random(1);
  const Rule& rule = GetParam();
  for (const auto storage : all_storages()) {
    for (const auto numel : all_sizes()) {
      RunBuffers expected(rule, storage, numel, random);
      const RunBuffers start = expected;
      for (const std::int64_t step : {1, 2}) {
        const auto coefficients = make_coefficients(rule.algorithm, rule.hyper, step, kFactor);
        kernels::reference::update(rule.algorithm, storage.format, coefficients, expected.buffers());
      }
      for (const auto& target : available_targets()) {
        SCOPED_TRACE(fmt::format("{}, format {}, grad type {}, numel {}", target, static_cast<int>(storage.format),
                                 static_cast<int>(storage.grad_type), numel));
        const RunBuffers actual = start;
        for (const std::int64_t step : {1, 2}) {
          const auto coefficients = make_coefficients(rule.algorithm, rule.hyper, step, kFactor);
          update(rule.algorithm, storage.format, coefficients, actual.buffers(), target);
        }
        ASSERT_TRUE(actual.is_same_as(expected));
        ASSERT_TRUE(actual.are_guards_intact());
      }
    }
  }
}

TEST_P(UpdateKernels, IgnoreAndRestoreTheCallersFloatModes) {
  std::mt19937 random(2);
  const Rule& rule = GetParam();
  const auto coefficients = make_coefficients(rule.algorithm, rule.hyper, 3, kFactor);
  for (const auto storage : all_storages()) {
    const RunBuffers start(rule, storage, 4099, random);
    for (const auto& target : available_targets()) {
      const RunBuffers expected = start;
      update(rule.algorithm, storage.format, coefficients, expected.buffers(), target);
      const RunBuffers actual = start;
      {
        const HostileFloatModes modes;
        update(rule.algorithm, storage.format, coefficients, actual.buffers(), target);
        EXPECT_TRUE(modes.are_unchanged());
      }
      EXPECT_TRUE(actual.is_same_as(expected)) << target;
    }
  }
}

TEST_P(UpdateKernels, GiveTheSameMasterInEveryFormat) {
  std::mt19937 random(3);
  const Rule& rule = GetParam();
  RunBuffers fp32(rule, {StateFormat::kFp32, GradType::kFp32}, 2000, random);
  const auto coefficients = make_coefficients(rule.algorithm, rule.hyper, 2, kFactor);
  std::vector<RunBuffers> others;
  for (const auto format : {StateFormat::kFp16, StateFormat::kBf16}) {
    RunBuffers& other = others.emplace_back(rule, Storage{format, GradType::kFp32}, 2000, random);
    for (std::int64_t i = 0; i < 2000; ++i) {
      other.set_weight(format, i, fp32.weight(StateFormat::kFp32, i));
    }
    std::memcpy(other.state1.as<char>(), fp32.state1.as<char>(), fp32.state1.nbytes());
    std::memcpy(other.state2.as<char>(), fp32.state2.as<char>(), fp32.state2.nbytes());
    std::memcpy(other.grad.as<char>(), fp32.grad.as<char>(), fp32.grad.nbytes());
    update(rule.algorithm, format, coefficients, other.buffers());
  }
  update(rule.algorithm, StateFormat::kFp32, coefficients, fp32.buffers());
  for (std::int64_t i = 0; i < 2000; ++i) {
    const auto expected = std::bit_cast<std::uint32_t>(fp32.weight(StateFormat::kFp32, i));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(others[0].weight(StateFormat::kFp16, i)), expected);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(others[1].weight(StateFormat::kBf16, i)), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(AllRules, UpdateKernels, ::testing::ValuesIn(all_rules()),
                         [](const auto& rule) { return rule.param.name; });

// Hands out ranges of random lengths, in an order of its own.
void scattered_for(std::int64_t count, std::int64_t /*grain*/,
                   const std::function<void(std::int64_t, std::int64_t)>& body) {
  std::mt19937 random(7);
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (std::int64_t begin = 0; begin < count;) {
    const std::int64_t end = std::min<std::int64_t>(count, begin + 1 + static_cast<std::int64_t>(random() % 5));
    ranges.emplace_back(begin, end);
    begin = end;
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  for (const auto& [begin, end] : ranges) {
    body(begin, end);
  }
}

TEST(UpdateAll, DoesNotDependOnThreadsOrSplits) {
  std::mt19937 random(4);
  const Storage storage{StateFormat::kBf16, GradType::kBf16};
  const Rule rule = all_rules()[0];
  std::vector<RunBuffers> expected;
  for (const std::int64_t numel : {5, 0, 4096, 300001, 4097, 1, 65536, 12345}) {
    expected.emplace_back(rule, storage, numel, random);
  }
  const std::vector<RunBuffers> start = expected;
  const auto tasks_of = [&](const std::vector<RunBuffers>& runs) {
    std::vector<UpdateTask> tasks;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto step = static_cast<std::int64_t>(i + 1);
      tasks.push_back({make_coefficients(rule.algorithm, rule.hyper, step, kFactor), runs[i].buffers()});
    }
    return tasks;
  };
  for (const auto& task : tasks_of(expected)) {
    kernels::reference::update(rule.algorithm, storage.format, task.coefficients, task.buffers);
  }
  const auto expect_same = [&](const ParallelFor& parallel) {
    const std::vector<RunBuffers> actual = start;
    update_all(rule.algorithm, storage.format, tasks_of(actual), parallel);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(actual[i].is_same_as(expected[i])) << "task " << i;
      EXPECT_TRUE(actual[i].are_guards_intact());
    }
  };
  expect_same(serial_for);
  expect_same(scattered_for);
  for (const int num_threads : {1, 2, 3, 4}) {
    ThreadTeam team(num_threads);
    expect_same(team.parallel_for());
  }
}

TEST(UpdateAll, LeavesEverythingWhereOneTaskIsBad) {
  std::mt19937 random(5);
  const Storage storage{StateFormat::kFp32, GradType::kFp32};
  const Rule rule = all_rules()[0];
  const RunBuffers run(rule, storage, 100, random);
  const RunBuffers before = run;
  const auto coefficients = make_coefficients(rule.algorithm, rule.hyper, 1, 1.0F);
  auto bad = run.buffers();
  bad.state2 = nullptr;
  EXPECT_THROW(
      update_all(rule.algorithm, storage.format, {{coefficients, run.buffers()}, {coefficients, bad}}, serial_for),
      InternalError);
  EXPECT_TRUE(run.is_same_as(before));
}

TEST(Update, RefusesWhatCannotOccur) {
  std::mt19937 random(6);
  const Rule rule = all_rules()[0];
  const RunBuffers run(rule, {StateFormat::kBf16, GradType::kBf16}, 8, random);
  auto buffers = run.buffers();
  EXPECT_THROW(update(rule.algorithm, StateFormat::kBf16, {}, buffers, "SSE9"), InternalError);
  EXPECT_THROW(update(rule.algorithm, StateFormat::kFp16, {}, buffers), InternalError);
  buffers.grad_type = GradType::kFp16;
  for (const auto& target : available_targets()) {
    EXPECT_THROW(update(rule.algorithm, StateFormat::kBf16, {}, buffers, target), InternalError);
  }
  EXPECT_THROW(static_cast<void>(slice(StateFormat::kBf16, buffers, 4, 5)), InternalError);
}

TEST(Update, OffersReferenceLast) {
  const auto targets = available_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.back(), "reference");
}

TEST(Update, KeepsFiniteWeightsWithoutGradientAndDecay) {
  std::mt19937 random(8);
  for (const auto& rule : all_rules()) {
    auto hyper = rule.hyper;
    hyper.weight_decay = 0;
    RunBuffers run(rule, {StateFormat::kBf16, GradType::kFp32}, 999, random);
    for (std::int64_t i = 0; i < 999; ++i) {
      const float x = awkward(random);
      run.set_weight(StateFormat::kBf16, i, std::isfinite(x) ? x : -0.0F);
    }
    std::memset(run.state1.as<char>(), 0, run.state1.nbytes());
    std::memset(run.state2.as<char>(), 0, run.state2.nbytes());
    std::memset(run.grad.as<char>(), 0, run.grad.nbytes());
    const RunBuffers before = run;
    update(rule.algorithm, StateFormat::kBf16, make_coefficients(rule.algorithm, hyper, 1, 1.0F), run.buffers());
    EXPECT_TRUE(run.is_same_as(before)) << rule.name;
  }
}

}  // namespace
}  // namespace pannier::testing
