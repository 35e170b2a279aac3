#include "pannier/tier/parameter_shards.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

namespace pannier {
namespace {

/// Both homes, with movers that wait a random while before each piece.
class ParameterShardsTest : public testing::TestWithParam<Home> {
 protected:
  void SetUp() override {
    shards_ = GetParam() == Home::kHost ? make_host_shards(*device_, memory_, up_, down_, at::kFloat, numels_)
                                        : make_device_shards(*device_, at::kFloat, numels_);
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

  std::unique_ptr<Device> device_ = make_metered_cpu();
  HostMemory memory_;
  MoverOptions movers_{.piece_nbytes = 256, .depth = 2, .delay_seed = 7};
  Mover up_{*device_, Queue::kUp, movers_};
  Mover down_{*device_, Queue::kDown, movers_};
  std::vector<std::int64_t> numels_{128, 0, 640};
  std::unique_ptr<ParameterShards> shards_;
};

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

INSTANTIATE_TEST_SUITE_P(Homes, ParameterShardsTest, testing::Values(Home::kDevice, Home::kHost),
                         [](const auto& home) { return home.param == Home::kHost ? "Host" : "Device"; });

}  // namespace
}  // namespace pannier
