// What a disk's faults do to training: nothing, or an error after which step() goes on to the same bits.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>

#include "pannier/base/error.h"
#include "pannier/engine/engine_core.h"
#include "pannier/io/extent_file.h"
#include "pannier/io/faulty_disk.h"
#include "tests/comm/borrowed.h"
#include "tests/comm/run_ranks.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kNumel = 9'001;

/// What rests on the disk; of states, whether they are updated beside the next forward, or on the device.
enum class OnDisk { kStates, kParameters, kBoth, kStatesOverlapped, kStatesStreamed };

// Calls until it ends well; how often it threw.
int call_until_done(const std::function<void()>& call) {
  for (int errors = 0; errors < 50; ++errors) {
    try {
      call();
      return errors;
    } catch (const IoError&) {
      continue;
    }
  }
  throw std::runtime_error("it never ends well");
}

// An engine over three parameters, whose gradients are what the step's number says.
class Training {
 public:
  Training(const std::string& folder, PieceHook* hook, Communicator* communicator = nullptr,
           OnDisk on_disk = OnDisk::kStates)
      : has_parameters_on_disk_(!folder.empty() && (on_disk == OnDisk::kParameters || on_disk == OnDisk::kBoth)) {
    const bool has_states = !folder.empty() && on_disk != OnDisk::kParameters;
    const std::string states =
        has_states
            ? fmt::format(R"({{"device": "nvme", "nvme_path": "{}", "buffer_count": 1, "buffer_size": 98304}})", folder)
            : R"({"device": "cpu"})";
    const std::string parameters =
        has_parameters_on_disk_
            ? fmt::format(R"("stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {{"device": "nvme",
                             "nvme_path": "{}", "buffer_count": 1, "buffer_size": 8192}})",
                          folder)
            : R"("stage": 2)";
    const Config config = Config::from_text(fmt::format(
        R"({{"train_batch_size": {}, "bf16": {{"enabled": true}}, "optimizer": {{"type": "AdamW"}},
            "zero_optimization": {{{}, "reduce_bucket_size": 20000, "offload_optimizer": {}}},
            "pannier": {{"overlap_step": {}, "streamed_share": {}}}}})",
        communicator == nullptr ? 1 : communicator->world_size(), parameters, states,
        on_disk == OnDisk::kStatesOverlapped, on_disk == OnDisk::kStatesStreamed ? 1 : 0));
    EngineInputs inputs;
    for (int i = 0; i < 3; ++i) {
      parameters_.push_back(at::linspace(-1, 1, kNumel + i).set_requires_grad(true));
      inputs.names.push_back(fmt::format("layer{}.weight", i));
      inputs.group_of.push_back(0);
    }
    inputs.parameters = parameters_;
    inputs.groups = {{.lr = 0.01}};
    inputs.algorithm = kernels::Algorithm::kAdamW;
    inputs.disk_hook = hook;
    const int world = communicator == nullptr ? 1 : communicator->world_size();
    if (communicator != nullptr) {
      inputs.communicator = std::make_unique<testing::Borrowed>(*communicator);
    }
    core_ = std::make_unique<EngineCore>(config, std::move(inputs), config.resolve_batch(world, std::nullopt));
  }

  void backward() {
    core_->tick_forward(0);
    backward_of_this_forward();
  }
  // As backward(), calling tick_forward() until it ends well; how often it threw.
  int backward_until_done() {
    const int errors = call_until_done([&] { core_->tick_forward(0); });
    backward_of_this_forward();
    return errors;
  }
  void backward_of_this_forward() {
    ++num_backwards_;
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : parameters_) {
      const at::Tensor slope = at::arange(parameter.numel()).fmod(7).sub(3).mul(num_backwards_);
      loss = loss + parameter.to(at::kFloat).mul(slope).sum();
    }
    core_->begin_backward(loss, true).second.backward();
    core_->end_backward();
  }
  void step() { (void)core_->step({{.lr = 0.01}}); }
  void train(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      backward();
      step();
    }
  }
  // Calls step() until it ends well; how often it threw.
  int step_until_done(const std::function<void(const IoError&)>& see = nullptr) {
    for (int errors = 0; errors < 50; ++errors) {
      try {
        step();
        return errors;
      } catch (const IoError& error) {
        if (see) {
          see(error);
        }
      }
    }
    throw std::runtime_error("step() never ends");
  }
  // A step on a disk that is well again; what was read ahead of it may still tell of an error.
  void train_one_until_done() {
    (void)backward_until_done();
    (void)step_until_done();
  }
  std::vector<at::Tensor> bits() {
    core_->synchronize();
    std::vector<at::Tensor> result;
    for (int i = 0; i < 3; ++i) {
      if (!has_parameters_on_disk_) {
        result.push_back(parameters_[static_cast<std::size_t>(i)].detach().to(at::kFloat).clone());
      }
      for (const char* name : {"fp32_param", "exp_avg", "exp_avg_sq"}) {
        result.push_back(core_->state(i, name));
      }
    }
    return result;
  }
  EngineCore& core() { return *core_; }
  const at::Tensor& parameter(int index) { return parameters_.at(static_cast<std::size_t>(index)); }

 private:
  bool has_parameters_on_disk_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<EngineCore> core_;
  int num_backwards_ = 0;
};

bool same(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](const at::Tensor& a, const at::Tensor& b) { return at::equal(a, b); });
}

std::vector<at::Tensor> bits_after(int num_steps) {
  Training run("", nullptr);
  run.train(num_steps);
  return run.bits();
}

// Of bits_after(), what a run with parameters on the disk shows.
std::vector<at::Tensor> states_after(int num_steps) {
  std::vector<at::Tensor> bits = bits_after(num_steps);
  for (const std::ptrdiff_t at : {8, 4, 0}) {
    bits.erase(bits.begin() + at);
  }
  return bits;
}

TEST(NvmeEngine, AnErrorBeforeTheFirstUpdateLeavesEverythingAsItWas) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk);
  run.train(2);
  run.core().synchronize();
  const auto before = bits_after(2);
  (void)run.bits();  // The buffers hold something else now than what the step reads first.
  run.backward();
  disk.add({.on_read = true});
  EXPECT_THROW(run.step(), IoError);
  disk.clear();
  EXPECT_TRUE(same(run.bits(), before));
  EXPECT_EQ(run.core().parameter_step(0), 2);
  EXPECT_EQ(run.core().counters().global_steps, 2);
  EXPECT_NO_THROW(run.core().tick_forward(0));
  EXPECT_THROW(run.backward(), ConfigError);
  run.step();
  EXPECT_TRUE(same(run.bits(), bits_after(3)));
}

TEST(NvmeEngine, GradientsOfAStepThatNeverBeganCanBeDropped) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk);
  run.train(1);
  (void)run.bits();
  run.backward();
  disk.add({.on_read = true});
  EXPECT_THROW(run.step(), IoError);
  disk.clear();
  run.core().drop_gradients();
  EXPECT_THROW(run.step(), ConfigError);
  EXPECT_TRUE(same(run.bits(), bits_after(1)));
}

class NvmeUpdates : public ::testing::TestWithParam<OnDisk> {};

TEST_P(NvmeUpdates, AStepThatFailsInTheMiddleIsFinishedToTheSameBits) {
  const auto expected = bits_after(4);
  for (const Fault& kind : {Fault{.on_read = true}, Fault{.on_write = true, .error_number = ENOSPC},
                            Fault{.kind = FaultKind::kFlipBit, .on_read = true, .bit = 77},
                            Fault{.kind = FaultKind::kShort, .on_read = true, .on_write = true, .nbytes = 4096}}) {
    int num_errors = 0;
    for (std::size_t skip = 0; skip < 9; ++skip) {
      const TemporaryFolder folder;
      FaultyDisk disk;
      Training run(folder.path(), &disk, nullptr, GetParam());
      run.train(2);
      run.core().synchronize();
      Fault fault = kind;
      fault.skip = skip;
      fault.times = 2;
      disk.add(fault);
      run.backward();
      num_errors += run.step_until_done([&](const IoError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("of extent"), HasSubstr(".weight")));
      });
      while (true) {  // Writes that fail after the step are told by what comes next.
        try {
          run.core().synchronize();
          break;
        } catch (const IoError&) {
          ++num_errors;
        }
      }
      disk.clear();
      run.train_one_until_done();
      EXPECT_TRUE(same(run.bits(), expected)) << static_cast<int>(kind.kind) << " after " << skip;
    }
    if (kind.kind == FaultKind::kShort) {
      EXPECT_EQ(num_errors, 0);
    } else {
      EXPECT_GE(num_errors, 6) << static_cast<int>(kind.kind);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(OnDisk, NvmeUpdates, ::testing::Values(OnDisk::kStates, OnDisk::kStatesStreamed),
                         [](const auto& on_disk) { return on_disk.param == OnDisk::kStates ? "Host" : "Device"; });

TEST(NvmeEngine, ParametersOnADiskThatFailsComeToTheSameBits) {
  const auto expected = states_after(4);
  for (const OnDisk on_disk : {OnDisk::kParameters, OnDisk::kBoth}) {
    for (const Fault& kind : {Fault{.on_read = true}, Fault{.on_write = true, .error_number = ENOSPC},
                              Fault{.kind = FaultKind::kFlipBit, .on_read = true, .bit = 77}}) {
      int num_errors = 0;
      for (std::size_t skip = 0; skip < 20; skip += 3) {
        const TemporaryFolder folder;
        FaultyDisk disk;
        Training run(folder.path(), &disk, nullptr, on_disk);
        run.train(2);
        run.core().synchronize();
        Fault fault = kind;
        fault.skip = skip;
        fault.times = 2;
        disk.add(fault);
        num_errors += run.backward_until_done();
        num_errors += run.step_until_done();
        num_errors += call_until_done([&] { run.core().synchronize(); });
        disk.clear();
        run.train_one_until_done();
        EXPECT_TRUE(same(run.bits(), expected)) << static_cast<int>(kind.kind) << " after " << skip;
      }
      EXPECT_GE(num_errors, 1) << static_cast<int>(kind.kind);
    }
  }
}

TEST(NvmeEngine, AnOverlappedStepThatADiskStopsIsToldOfByTheNextCallAndFinished) {
  const auto expected = bits_after(4);
  for (const Fault& kind : {Fault{.on_read = true}, Fault{.on_write = true, .error_number = ENOSPC},
                            Fault{.kind = FaultKind::kFlipBit, .on_read = true, .bit = 77}}) {
    int num_errors = 0;
    for (std::size_t skip = 0; skip < 9; ++skip) {
      const TemporaryFolder folder;
      FaultyDisk disk;
      Training run(folder.path(), &disk, nullptr, OnDisk::kStatesOverlapped);
      run.train(2);
      run.core().synchronize();
      run.backward();
      Fault fault = kind;
      fault.skip = skip;
      fault.times = 2;
      disk.add(fault);
      EXPECT_NO_THROW(run.step());
      EXPECT_EQ(run.core().counters().global_steps, 3);
      num_errors += call_until_done([&] { run.core().tick_forward(0); });
      num_errors += call_until_done([&] { run.core().synchronize(); });
      disk.clear();
      run.train_one_until_done();
      EXPECT_TRUE(same(run.bits(), expected)) << static_cast<int>(kind.kind) << " after " << skip;
    }
    EXPECT_GE(num_errors, 1) << static_cast<int>(kind.kind);
  }
}

TEST(NvmeEngine, WhatAnOverlappedStepHasNotFinishedIsRefusedUntilTheDiskIsWell) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk, nullptr, OnDisk::kStatesOverlapped);
  run.train(2);
  run.core().synchronize();
  run.backward();
  disk.add({.on_read = true, .skip = 1});
  run.step();
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_THROW(run.core().tick_forward(0), IoError);
    EXPECT_THROW((void)run.core().state(0, "exp_avg"), IoError);
    EXPECT_THROW(run.core().synchronize(), IoError);
    EXPECT_THROW(run.step(), IoError);
  }
  disk.clear();
  EXPECT_TRUE(same(run.bits(), bits_after(3)));
}

TEST(NvmeEngine, AnEngineWhoseDiskFailsForGoodCanBeClosed) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk, nullptr, OnDisk::kStatesOverlapped);
  run.train(1);
  run.core().synchronize();
  run.backward();
  disk.add({.on_read = true, .skip = 1});
  run.step();
  run.core().close();
  EXPECT_THAT(folder.names(), ::testing::IsEmpty());
}

TEST(NvmeEngine, AParameterThatSomebodyElseHoldsIsInPlaceWhenAnOverlappedStepReturns) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk, nullptr, OnDisk::kStatesOverlapped);
  const at::Tensor held = run.parameter(1).detach();
  run.train(2);
  run.core().synchronize();
  run.backward();
  disk.add({.on_read = true, .times = 2});
  EXPECT_GE(run.step_until_done(), 1);
  EXPECT_TRUE(at::equal(held.to(at::kFloat), bits_after(3).at(4)));
  EXPECT_TRUE(same(run.bits(), bits_after(3)));
}

TEST(NvmeEngine, ARankWhoseParameterCannotBeReadEndsTheGroupWithItsError) {
  const TemporaryFolder folder;
  testing::run_ranks(2, [&](Communicator& communicator) {
    FaultyDisk disk;
    Training run(folder.path(), &disk, &communicator, OnDisk::kParameters);
    run.train(1);
    run.core().synchronize();
    if (communicator.rank() == 1) {
      disk.add({.on_read = true});
    }
    try {
      run.core().tick_forward(0);
      ADD_FAILURE() << "a forward without its parameters";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("read of extent"));
    }
  });
}

TEST(NvmeEngine, AHalfDoneStepRefusesEverythingElse) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk);
  run.train(2);
  run.core().synchronize();
  run.backward();
  disk.add({.on_read = true, .skip = 2, .times = 1});
  EXPECT_THROW(run.step(), IoError);
  EXPECT_THROW(run.core().tick_forward(0), ConfigError);
  EXPECT_THROW(run.backward(), ConfigError);
  EXPECT_THROW((void)run.core().state(0, "exp_avg"), ConfigError);
  EXPECT_THROW(run.core().synchronize(), ConfigError);
  EXPECT_THROW(run.core().drop_gradients(), ConfigError);
  EXPECT_THROW(run.core().parameters_changed(), ConfigError);
  run.step();
  EXPECT_NO_THROW(run.core().synchronize());
}

TEST(NvmeEngine, AWriteThatFailsAfterTheStepIsToldOnceByTheNextCall) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk);
  run.train(1);
  run.core().synchronize();
  disk.add({.kind = FaultKind::kDelay, .on_write = true, .delay = std::chrono::milliseconds(100)});
  disk.add({.on_write = true, .skip = 6, .times = 1});
  run.backward();
  run.step();
  try {
    run.core().synchronize();
    ADD_FAILURE() << "nobody was told";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("write of extent"));
  }
  EXPECT_NO_THROW(run.core().synchronize());
  disk.clear();
  EXPECT_TRUE(same(run.bits(), bits_after(2)));
}

TEST(NvmeEngine, ASlowDiskIsWaitedFor) {
  const TemporaryFolder folder;
  FaultyDisk disk;
  Training run(folder.path(), &disk);
  disk.add({.kind = FaultKind::kDelay, .on_read = true, .on_write = true, .delay = std::chrono::milliseconds(20)});
  run.train(2);
  disk.clear();
  EXPECT_TRUE(same(run.bits(), bits_after(2)));
}

class NvmeRanks : public ::testing::TestWithParam<OnDisk> {};

TEST_P(NvmeRanks, AllTellOfTheOneWhoseDiskFailedAndFinishTogether) {
  const TemporaryFolder folder;
  std::vector<std::vector<at::Tensor>> bits(3);
  for (const bool is_faulty : {false, true}) {
    testing::run_ranks(2, [&](Communicator& communicator) {
      FaultyDisk disk;
      Training run(folder.path(), &disk, &communicator, GetParam());
      run.train(2);
      run.core().synchronize();
      run.backward();
      if (is_faulty && communicator.rank() == 1) {
        const bool reads = GetParam() != OnDisk::kParameters && GetParam() != OnDisk::kBoth;
        disk.add({.on_read = reads, .on_write = !reads, .skip = 1, .times = 1});
      }
      const int errors = run.step_until_done([&](const IoError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1: "), HasSubstr(" of extent"), HasSubstr(".weight")));
        EXPECT_THROW(run.core().synchronize(), ConfigError);
      });
      EXPECT_EQ(errors, is_faulty ? 1 : 0);
      run.train(1);
      if (communicator.rank() == 0) {
        bits[is_faulty ? 1 : 0] = run.bits();
      } else {
        (void)run.bits();
      }
    });
  }
  EXPECT_TRUE(same(bits[0], bits[1]));
}

INSTANTIATE_TEST_SUITE_P(OnDisk, NvmeRanks,
                         ::testing::Values(OnDisk::kStates, OnDisk::kParameters, OnDisk::kBoth,
                                           OnDisk::kStatesOverlapped, OnDisk::kStatesStreamed),
                         [](const auto& on_disk) {
                           return on_disk.param == OnDisk::kStates             ? "States"
                                  : on_disk.param == OnDisk::kParameters       ? "Parameters"
                                  : on_disk.param == OnDisk::kStatesOverlapped ? "Overlapped"
                                  : on_disk.param == OnDisk::kStatesStreamed   ? "Streamed"
                                                                               : "Both";
                         });

}  // namespace
}  // namespace pannier
