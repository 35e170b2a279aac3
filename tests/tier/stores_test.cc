#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"
#include "pannier/tier/gradient_store.h"
#include "pannier/tier/parameter_buckets.h"
#include "pannier/tier/state_store.h"

namespace pannier {
namespace {

const std::vector<std::int64_t> kNumels{128, 64};
const StateShape kBf16{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};

TEST(StateStore, LendsABucketOnceAtATime) {
  HostMemory memory;
  const auto store = std::make_unique<HostStateStore>(memory, kBf16, kNumels);
  {
    const Lease lease = store->lease(1);
    EXPECT_NE(lease.view().state2, nullptr);
    EXPECT_THROW((void)store->lease(1), InternalError);
    EXPECT_NO_THROW((void)store->lease(0));
  }
  EXPECT_NO_THROW((void)store->lease(1));
}

TEST(StateStore, HostStartsAtZeroAndCountsWhatItMaps) {
  HostMemory memory;
  const auto store = std::make_unique<HostStateStore>(memory, kBf16, kNumels);
  EXPECT_EQ(memory.current_bytes(), 4096U);
  const Lease lease = store->lease(0);
  for (int i = 0; i < 128; ++i) {
    EXPECT_EQ(lease.view().state1[i], 0.0F);
  }
}

TEST(StateStore, DeviceCountsAsOptimizerStatesAndHasNoArraysThatTheFormatLacks) {
  const auto device = make_metered_cpu();
  const std::size_t before = device->memory().current_by_owner[2];
  const at::Tensor param = at::zeros({128}, at::kFloat);
  const auto store = make_device_store(*device, {.param_nbytes = 4, .rest_nbytes = 0, .num_states = 1}, {128},
                                       [&](int) { return param; });
  const Lease lease = store->lease(0);
  EXPECT_EQ(device->memory().current_by_owner[2] - before, 512U);
  EXPECT_EQ(lease.view().param, param.data_ptr());
  EXPECT_EQ(lease.view().rest, nullptr);
  EXPECT_EQ(lease.view().state2, nullptr);
}

TEST(ParameterBuckets, KeepsShapeStridesAndValues) {
  const auto device = make_metered_cpu();
  at::Tensor transposed = at::arange(6.0, at::kFloat).view({2, 3}).t();
  at::Tensor scalar = at::full({}, 3.0F);
  const at::Tensor before = transposed.clone();
  const std::vector<std::int64_t> numels{6, 1};
  const BucketLayout layout(numels, {});
  ParameterBuckets buckets(*device, layout, {transposed, scalar}, {"t", "s"}, at::kFloat);
  buckets.fill(0, [&](const Segment& segment, const at::Tensor& values) {
    at::Tensor flat = buckets.bucket(0).narrow(0, segment.offset, segment.numel);
    flat.copy_(values);
  });
  EXPECT_TRUE(at::equal(transposed, before));
  EXPECT_EQ(transposed.strides().vec(), (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(scalar.item<float>(), 3.0F);
  EXPECT_EQ(transposed.data_ptr(), buckets.address(0));
  EXPECT_EQ(transposed.storage().nbytes(), 24U);
}

TEST(ParameterBuckets, FindsEditsOnce) {
  const auto device = make_metered_cpu();
  at::Tensor a = at::ones({4});
  at::Tensor b = at::ones({4});
  const std::vector<std::int64_t> numels{4, 4};
  const BucketLayout layout(numels, {});
  ParameterBuckets buckets(*device, layout, {a, b}, {"a", "b"}, at::kFloat);
  buckets.fill(0, [](const Segment&, const at::Tensor&) {});
  EXPECT_TRUE(buckets.take_edits(true).empty());
  a.add_(1);
  b.set_data(at::full({4}, 7.0F));
  EXPECT_EQ(buckets.take_edits(true), (std::vector<int>{0, 1}));
  EXPECT_EQ(b.data_ptr(), buckets.address(1));
  EXPECT_TRUE(at::equal(b, at::full({4}, 7.0F)));
  EXPECT_TRUE(buckets.take_edits(true).empty());
  a.set_data(a.to(at::kDouble));
  EXPECT_THROW((void)buckets.take_edits(true), ConfigError);
}

TEST(ParameterBuckets, NeverOverwritesWhatSomebodyKept) {
  const auto device = make_metered_cpu();
  at::Tensor a = at::ones({2, 2});
  const std::vector<std::int64_t> numels{4};
  const BucketLayout layout(numels, {});
  ParameterBuckets buckets(*device, layout, {a}, {"a"}, at::kFloat);
  buckets.fill(0, [&](const Segment&, const at::Tensor& values) { buckets.bucket(0).narrow(0, 0, 4).copy_(values); });
  at::Tensor kept = a.detach();
  a.set_data(at::full({2, 2}, 5.0F));
  EXPECT_TRUE(buckets.take_edits(false).empty());
  EXPECT_THROW((void)buckets.take_edits(true), ConfigError);
  EXPECT_TRUE(at::equal(kept, at::ones({2, 2})));
  kept = at::Tensor();
  EXPECT_EQ(buckets.take_edits(true).size(), 1U);
  a.select(0, 0).fill_(1);
  a.set_data(a.detach().t());
  EXPECT_EQ(buckets.take_edits(true).size(), 1U);
  EXPECT_EQ(a[1][0].item<float>(), 1.0F);
  EXPECT_TRUE(a.is_contiguous());
  for (const at::Tensor& other : {at::ones({4}), at::ones({1, 4})}) {
    a.set_data(other);
    EXPECT_THROW((void)buckets.take_edits(true), ConfigError);
  }
}

TEST(ParameterBuckets, RefusesMemoryThatOverlaps) {
  const auto device = make_metered_cpu();
  const std::vector<std::int64_t> numels{6};
  const BucketLayout layout(numels, {});
  EXPECT_THROW(ParameterBuckets(*device, layout, {at::ones({3, 1}).expand({3, 2})}, {"w"}, at::kFloat), ConfigError);
}

class GradientHomes : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<GradientStore> make(GradientStoreOptions options) {
    return GetParam() ? std::make_unique<HostGradients>(*device_, memory_, shards_, options, down_)
                      : make_device_gradients(*device_, 2, options);
  }
  static std::vector<float> read(const GradientView& view, std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    CpuCompute().accumulate(values.data(), view.data, view.type, count, true);
    return values;
  }
  std::unique_ptr<Device> device_ = make_metered_cpu();
  HostMemory memory_;
  BucketLayout layout_{kNumels, {}};
  ShardLayout shards_{layout_, 0, 1};
  Mover down_{*device_, Queue::kDown, {}};
};

TEST_P(GradientHomes, OneMicroBatchStaysInItsOwnType) {
  const auto store = make({.type = kernels::GradType::kBf16});
  EXPECT_EQ(store->view(0).data, nullptr);
  store->add(0, at::full({128}, 1.5, at::kBFloat16), true);
  EXPECT_EQ(store->view(0).type, kernels::GradType::kBf16);
  EXPECT_THAT(read(store->view(0), 128), testing::Each(1.5F));
  store->drop(0);
  EXPECT_EQ(store->view(0).data, nullptr);
}

TEST_P(GradientHomes, SumsAreFp32WhetherAnnouncedOrNot) {
  for (const bool announced : {true, false}) {
    const auto store = make({.type = kernels::GradType::kBf16, .accumulates = announced});
    for (int window = 0; window < 2; ++window) {
      store->add(1, at::full({64}, 1.0, at::kBFloat16), !announced);
      store->add(1, at::full({64}, 0x1p-9, at::kBFloat16), true);
      EXPECT_EQ(store->view(1).type, kernels::GradType::kFp32);
      EXPECT_THAT(read(store->view(1), 64), testing::Each(1.0F + 0x1p-9F));
      store->drop(1);
    }
  }
}

TEST_P(GradientHomes, AFirstThatWasLastWidensInPlace) {
  const auto store = make({.type = kernels::GradType::kFp16, .accumulates = true});
  store->add(1, at::full({64}, 2.0, at::kHalf), true);
  store->add(1, at::full({64}, 0.5, at::kHalf), true);
  EXPECT_THAT(read(store->view(1), 64), testing::Each(2.5F));
}

TEST_P(GradientHomes, SixteenBitSumsOnRequest) {
  const auto store = make({.type = kernels::GradType::kBf16, .accumulates = true, .sum_in_own_type = true});
  store->add(0, at::full({128}, 1.0, at::kBFloat16), false);
  store->add(0, at::full({128}, 0x1p-9, at::kBFloat16), true);
  EXPECT_EQ(store->view(0).type, kernels::GradType::kBf16);
  EXPECT_THAT(read(store->view(0), 128), testing::Each(1.0F));
}

TEST_P(GradientHomes, Fp32AddsUp) {
  const auto store = make({.type = kernels::GradType::kFp32});
  store->add(0, at::full({128}, 1.0), true);
  store->add(0, at::full({128}, 2.0), true);
  EXPECT_THAT(read(store->view(0), 128), testing::Each(3.0F));
}

INSTANTIATE_TEST_SUITE_P(Homes, GradientHomes, testing::Bool(),
                         [](const auto& param) { return param.param ? "Host" : "Device"; });

}  // namespace
}  // namespace pannier
