#include "pannier/tier/parameter_shards.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"
#include "pannier/io/faulty_disk.h"
#include "pannier/layout/bucket_layout.h"
#include "pannier/tier/nvme_shards.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

/// All homes, with movers that wait a random while before each piece.
class ParameterShardsTest : public testing::TestWithParam<Home> {
 protected:
  explicit ParameterShardsTest(std::size_t piece_nbytes = 256) : movers_{piece_nbytes, 2, 7} {}
  void SetUp() override {
    if (GetParam() == Home::kNvme) {
      shards_ = make_nvme_shards();
    } else {
      shards_ = GetParam() == Home::kHost
                    ? make_host_shards(*device_, memory_, up_, down_, shards_of_type(at::kFloat, numels_))
                    : make_device_shards(*device_, shards_of_type(at::kFloat, numels_));
    }
  }
  std::unique_ptr<NvmeShards> make_nvme_shards() {
    constexpr std::size_t kTwoBlocks = 2 * 4 * static_cast<std::size_t>(kBlockNumel);
    return std::make_unique<NvmeShards>(
        *device_, memory_, up_, down_, shards_of_type(at::kFloat, numels_),
        NvmeStateOptions{.folders = {folder_.path()}, .buffer_count = 1, .buffer_nbytes = kTwoBlocks, .hook = &disk_});
  }
  void TearDown() override {
    shards_.reset();
    up_.close();
    down_.close();
  }
  at::Tensor raised(int bucket) {
    const at::Tensor to = at::empty({numels_[static_cast<std::size_t>(bucket)]});
    shards_->raise(bucket, to);
    shards_->finish_raise(bucket);
    return to;
  }

  TemporaryFolder folder_;
  FaultyDisk disk_;
  std::unique_ptr<Device> device_ = make_metered_cpu();
  HostMemory memory_;
  MoverOptions movers_;
  Mover up_{*device_, Queue::kUp, movers_};
  Mover down_{*device_, Queue::kDown, movers_};
  std::vector<std::int64_t> numels_{128, 0, 640};
  std::unique_ptr<ParameterShards> shards_;
};

TEST_P(ParameterShardsTest, HoldShardsOfSeveralTypesSideBySide) {
  const std::vector<at::Tensor> values{at::arange(3 * 4096.0, at::kFloat), at::arange(200.0, at::kBFloat16),
                                       at::arange(100, at::kByte), at::arange(5000, at::kLong)};
  std::vector<RestingShard> sizes;
  for (const at::Tensor& tensor : values) {
    sizes.push_back({tensor.numel(), tensor.scalar_type()});
  }
  shards_.reset();
  if (GetParam() == Home::kNvme) {
    shards_ = std::make_unique<NvmeShards>(
        *device_, memory_, up_, down_, sizes,
        NvmeStateOptions{
            .folders = {folder_.path()}, .buffer_count = 1, .buffer_nbytes = std::size_t{32} << 10, .hook = &disk_});
  } else {
    shards_ = GetParam() == Home::kHost ? make_host_shards(*device_, memory_, up_, down_, sizes)
                                        : make_device_shards(*device_, sizes);
  }
  for (int b = 0; b < 4; ++b) {
    shards_->store(b, values[static_cast<std::size_t>(b)]);
  }
  for (int b = 3; b >= 0; --b) {
    const at::Tensor to = at::empty_like(values[static_cast<std::size_t>(b)]);
    shards_->raise(b, to);
    shards_->finish_raise(b);
    EXPECT_TRUE(at::equal(to, values[static_cast<std::size_t>(b)])) << b;
    EXPECT_TRUE(at::equal(shards_->own(b), values[static_cast<std::size_t>(b)])) << b;
    shards_->put_back(b);
  }
}

TEST_P(ParameterShardsTest, StartAtZeroAndKeepWhatWasStored) {
  EXPECT_TRUE(at::equal(raised(2), at::zeros({640})));
  shards_->store(0, at::arange(128.0, at::kFloat));
  shards_->store(2, at::arange(640.0, at::kFloat));
  EXPECT_TRUE(at::equal(raised(0), at::arange(128.0, at::kFloat)));
  EXPECT_TRUE(at::equal(raised(2), at::arange(640.0, at::kFloat)));
  EXPECT_EQ(raised(1).numel(), 0);
}

TEST_P(ParameterShardsTest, WhatIsWrittenIntoOwnRestsAfterPuttingItBack) {
  for (int round = 1; round < 20; ++round) {
    shards_->own(2).add_(1);
    shards_->put_back(2);
    EXPECT_TRUE(at::equal(raised(2), at::full({640}, static_cast<float>(round))));
  }
  shards_->put_back(2);  // Nothing was lent.
  shards_->settle(2);
  EXPECT_TRUE(at::equal(raised(2), at::full({640}, 19.0F)));
}

TEST_P(ParameterShardsTest, TakeDeviceMemoryOnlyWhereTheyRestThere) {
  const auto current = [this] {
    return device_->memory().current_by_owner[static_cast<std::size_t>(Owner::kParameters)];
  };
  const std::size_t with = current();
  shards_->own(0).fill_(3);
  shards_->put_back(0);
  shards_->settle(0);
  EXPECT_EQ(current(), with);
  shards_.reset();
  EXPECT_EQ(with - current(), GetParam() == Home::kDevice ? (128U + 640U) * 4 : 0U);
}

INSTANTIATE_TEST_SUITE_P(Homes, ParameterShardsTest, testing::Values(Home::kDevice, Home::kHost, Home::kNvme),
                         [](const auto& home) {
                           return home.param == Home::kHost ? "Host" : home.param == Home::kNvme ? "Nvme" : "Device";
                         });

/// Shards of many chunks, with two staging buffers.
class NvmeShardsTest : public ParameterShardsTest {
 protected:
  NvmeShardsTest() : ParameterShardsTest(16384) { numels_ = {3 * kBlockNumel + 5, 0, 40'000, 17}; }
  NvmeShards& shards() { return static_cast<NvmeShards&>(*shards_); }
  at::Tensor values(int bucket, int round) {
    return at::arange(numels_[static_cast<std::size_t>(bucket)], at::kFloat).add_(round * 1000 + bucket);
  }
};

TEST_P(NvmeShardsTest, HoldWhatWasStoredInAnyOrder) {
  for (int round = 0; round < 4; ++round) {
    for (const int bucket : {2, 0, 3}) {
      shards_->store(bucket, values(bucket, round));
    }
    shards_->expect({3, 2, 0});
    const at::Tensor first = at::empty({numels_[0]});
    shards_->raise(0, first);
    EXPECT_TRUE(at::equal(raised(2), values(2, round)));
    EXPECT_TRUE(at::equal(raised(3), values(3, round)));
    shards_->finish_raise(0);
    EXPECT_TRUE(at::equal(first, values(0, round)));
  }
  EXPECT_LE(memory_.peak_bytes(), 2U * 4 * static_cast<std::size_t>(kBlockNumel));
}

TEST_P(NvmeShardsTest, WhatIsWrittenAnewIsNotRead) {
  shards_->store(2, values(2, 0));
  shards().disk().settle();
  const std::uint64_t before = shards().disk().stats().read_nbytes;
  shards_->own_anew(2).copy_(values(2, 1));
  shards_->put_back(2);
  shards().disk().settle();
  EXPECT_EQ(shards().disk().stats().read_nbytes, before);
  EXPECT_TRUE(at::equal(raised(2), values(2, 1)));
}

TEST_P(NvmeShardsTest, AFailedCallMayBeMadeAgain) {
  shards_->store(0, values(0, 0));
  shards_->store(2, values(2, 0));
  shards().disk().settle();
  disk_.add({.on_read = true, .skip = 2, .times = 1});
  const at::Tensor to = at::empty({numels_[2]});
  shards_->raise(2, to);
  EXPECT_THROW(shards_->finish_raise(2), IoError);
  shards_->finish_raise(2);
  EXPECT_TRUE(at::equal(to, values(2, 0)));
  disk_.add({.on_read = true, .times = 1});
  EXPECT_THROW((void)shards_->own(0), IoError);
  EXPECT_TRUE(at::equal(shards_->own(0), values(0, 0)));
  disk_.add({.on_write = true, .skip = 1, .times = 1, .error_number = ENOSPC});
  shards_->own(2).copy_(values(2, 1));
  int errors = 0;
  for (bool is_done = false; !is_done;) {
    try {
      shards_->put_back(2);
      shards().disk().settle();
      is_done = true;
    } catch (const IoError&) {
      ASSERT_LE(++errors, 2);
    }
  }
  EXPECT_EQ(errors, 1);
  EXPECT_TRUE(at::equal(raised(2), values(2, 1)));
}

TEST_P(NvmeShardsTest, ARaiseThatNobodyFinishesIsGivenUp) {
  shards_->store(0, values(0, 0));
  shards_->raise(0, at::empty({numels_[0]}));
  shards_->settle(0);
  EXPECT_TRUE(at::equal(raised(0), values(0, 0)));
}

INSTANTIATE_TEST_SUITE_P(Homes, NvmeShardsTest, testing::Values(Home::kNvme), [](const auto&) { return "Nvme"; });

}  // namespace
}  // namespace pannier
