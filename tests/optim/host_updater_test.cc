#include "pannier/optim/host_updater.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "pannier/base/error.h"
#include "tests/device/watched_device.h"

namespace pannier {
namespace {

constexpr int kNumBuckets = 5;
constexpr std::size_t kNumel = 300;

/// Buckets of one parameter each: plain SGD, param -= lr * factor * grad.
class HostUpdaterTest : public testing::TestWithParam<std::uint64_t> {
 protected:
  [[nodiscard]] HostUpdaterOptions options() const {
    return {.algorithm = kernels::Algorithm::kSgd, .format = kernels::StateFormat::kFp32, .delay_seed = GetParam()};
  }
  [[nodiscard]] BucketUpdate update_of(int bucket) {
    const auto b = static_cast<std::size_t>(bucket);
    kernels::Hyperparameters hyper;
    hyper.lr = 0.5;
    hyper.momentum = 0.0;
    hyper.weight_decay = 0.0;
    BucketUpdate update{.bucket = bucket, .tasks = {}, .parameter = {}, .later = {}};
    update.tasks.push_back({kernels::make_coefficients(kernels::Algorithm::kSgd, hyper, 1, 1.0F),
                            {.param = host_[b].data(), .grad = gradient_.data(), .numel = std::int64_t{kNumel}}});
    update.parameter = {model_[b].data(), host_[b].data(), kNumel * sizeof(float)};
    return update;
  }
  [[nodiscard]] std::vector<BucketUpdate> all_updates() {
    std::vector<BucketUpdate> updates;
    for (int b = kNumBuckets - 1; b >= 0; --b) {
      updates.push_back(update_of(b));
    }
    return updates;
  }

  WatchedDevice device_;
  Mover up_{device_, Queue::kUp, {}};
  std::vector<std::vector<float>> host_{kNumBuckets, std::vector<float>(kNumel, 8.0F)};
  std::vector<std::vector<float>> model_{kNumBuckets, std::vector<float>(kNumel, -1.0F)};
  std::vector<float> gradient_ = std::vector<float>(kNumel, 1.0F);
};

TEST_P(HostUpdaterTest, WhatIsIssuedIsInPlace) {
  HostUpdater updater(up_, kNumBuckets, options());
  for (int step = 1; step <= 3; ++step) {
    updater.start(all_updates(), 2.0F, device_.record(Queue::kCompute));
    for (const int bucket : {2, 4, 0, 1, 3}) {
      updater.wait_issued(bucket)->wait();
      EXPECT_EQ(model_[static_cast<std::size_t>(bucket)], std::vector<float>(kNumel, 8.0F - static_cast<float>(step)));
    }
    const HostUpdateTime time = updater.take_time();
    EXPECT_EQ(time.numel, std::int64_t{kNumel} * kNumBuckets);
    EXPECT_GT(time.seconds, 0.0);
    EXPECT_EQ(updater.take_time().numel, 0);
  }
}

TEST_P(HostUpdaterTest, BucketsAreDoneInTheOrderGiven) {
  std::vector<void*> order;
  device_.before_copy = [&](Queue, void* to, std::size_t) { order.push_back(to); };
  HostUpdater updater(up_, kNumBuckets, options());
  updater.start(all_updates(), 1.0F, device_.record(Queue::kCompute));
  (void)updater.wait_issued(0);
  ASSERT_EQ(order.size(), std::size_t{kNumBuckets});
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(order[i], model_[kNumBuckets - 1 - i].data());
  }
}

TEST_P(HostUpdaterTest, CloseFinishesWhatWasBegun) {
  HostUpdater updater(up_, kNumBuckets, options());
  updater.start(all_updates(), 2.0F, device_.record(Queue::kCompute));
  updater.close();
  updater.close();
  up_.close();
  for (const auto& values : model_) {
    EXPECT_EQ(values, std::vector<float>(kNumel, 7.0F));
  }
  EXPECT_THROW(updater.start({}, 1.0F, nullptr), InternalError);
}

TEST_P(HostUpdaterTest, TheFirstErrorIsKept) {
  HostUpdater updater(up_, kNumBuckets, options());
  up_.close();  // The push of the first bucket fails.
  updater.start(all_updates(), 1.0F, device_.record(Queue::kCompute));
  for (int i = 0; i < 2; ++i) {
    for (int bucket = 0; bucket < kNumBuckets; ++bucket) {
      EXPECT_THROW((void)updater.wait_issued(bucket), InternalError);
    }
    EXPECT_THROW(updater.start(all_updates(), 1.0F, nullptr), InternalError);
  }
}

TEST_P(HostUpdaterTest, AFailedTransferReachesWhoWaits) {
  device_.before_copy = [&](Queue, void* to, std::size_t) {
    if (to == model_[1].data()) {
      throw std::runtime_error("the link is down");
    }
  };
  HostUpdater updater(up_, kNumBuckets, options());
  updater.start(all_updates(), 1.0F, device_.record(Queue::kCompute));
  EXPECT_THROW((void)updater.wait_issued(1), std::runtime_error);
  EXPECT_THROW((void)updater.wait_issued(0), std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(WithoutAndWithDelays, HostUpdaterTest, testing::Values(0, 1, 2));

}  // namespace
}  // namespace pannier
