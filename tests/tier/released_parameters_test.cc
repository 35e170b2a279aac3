#include "pannier/tier/released_parameters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

using testing::HasSubstr;

/// Three parameters in one bucket, one of them without elements.
class ReleasedParametersTest : public testing::Test {
 protected:
  void SetUp() override {
    buckets_.fill(0, [this](const Segment& segment, const at::Tensor& values) {
      buckets_.bucket(0).narrow(0, segment.offset, segment.numel).copy_(values);
    });
  }
  static std::string message_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  }

  std::unique_ptr<Device> device_ = make_metered_cpu();
  at::Tensor matrix_ = at::arange(6.0, at::kFloat).view({2, 3}).t();
  at::Tensor scalar_ = at::full({}, 3.0F);
  at::Tensor empty_ = at::empty({0, 2});
  std::vector<std::int64_t> numels_{6, 1, 0};
  BucketLayout layout_{numels_, {}};
  ParameterBuckets buckets_{*device_, layout_, {matrix_, scalar_, empty_}, {"m", "s", "e"}, at::kFloat};
  ReleasedParameters released_{layout_, buckets_, {.read = "while it was away", .replaced = "while it was away"}};
};

TEST_F(ReleasedParametersTest, ReadingThrowsAndShapesStay) {
  released_.release(0);
  EXPECT_TRUE(released_.is_released(0));
  EXPECT_THAT(message_of([&] { (void)matrix_.sum(); }), HasSubstr("parameter m was read while"));
  EXPECT_THAT(message_of([&] { (void)scalar_.item(); }), HasSubstr("parameter s was read while"));
  EXPECT_THAT(message_of([&] { matrix_.zero_(); }), HasSubstr("parameter m was read while"));
  EXPECT_EQ(matrix_.t().sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(empty_.sum().item<float>(), 0.0F);
  EXPECT_THROW(released_.release(0), InternalError);
}

TEST_F(ReleasedParametersTest, RestoringBringsTheSameMemoryAndVersion) {
  const void* before = matrix_.data_ptr();
  const auto version = matrix_._version();
  for (int i = 0; i < 3; ++i) {
    released_.release(0);
    buckets_.bucket(0).add_(1);
    released_.restore(0);
    released_.restore(0);
  }
  EXPECT_EQ(matrix_.data_ptr(), before);
  EXPECT_EQ(matrix_._version(), version);
  EXPECT_EQ(matrix_[2][1].item<float>(), 8.0F);
  EXPECT_TRUE(buckets_.take_edits(true).empty());
}

TEST_F(ReleasedParametersTest, AViewTakenMeanwhileNeverReads) {
  released_.release(0);
  const at::Tensor view = matrix_.detach();
  released_.restore(0);
  EXPECT_THAT(message_of([&] { (void)view.sum(); }), HasSubstr("parameter m was read while"));
}

TEST_F(ReleasedParametersTest, AliasesAreSeenUntilTheyGo) {
  EXPECT_EQ(released_.aliased(0), -1);
  {
    const at::Tensor alias = matrix_.detach();
    EXPECT_EQ(released_.aliased(0), 0);
    EXPECT_EQ(released_.aliased(0), 0);
    EXPECT_EQ(alias.data_ptr(), matrix_.data_ptr());
    const at::Tensor second = scalar_.view({1});
    EXPECT_NE(released_.aliased(0), -1);
  }
  EXPECT_EQ(released_.aliased(0), -1);
}

TEST_F(ReleasedParametersTest, AnAliasThatWasSeenGuardsItsMemoryAgainstReplacedData) {
  const at::Tensor alias = matrix_.detach();
  EXPECT_EQ(released_.aliased(0), 0);
  matrix_.set_data(at::zeros({3, 2}));
  EXPECT_THROW((void)buckets_.take_edits(true), ConfigError);
  EXPECT_EQ(alias[2][1].item<float>(), 5.0F);
}

TEST_F(ReleasedParametersTest, ReplacedDataIsRefusedAndGone) {
  for (const at::Tensor& data : {at::zeros({3, 2}), at::zeros({7}), at::zeros({3, 2}, at::kDouble)}) {
    released_.release(0);
    matrix_.set_data(data);
    EXPECT_THAT(message_of([&] { released_.restore(0); }), HasSubstr("the data of parameter m was replaced while"));
    EXPECT_FALSE(released_.is_released(0));
    EXPECT_EQ(scalar_.item<float>(), 3.0F);
    EXPECT_EQ(matrix_.scalar_type(), at::kFloat);
    EXPECT_EQ(matrix_.strides(), (std::vector<std::int64_t>{1, 3}));
    EXPECT_EQ(matrix_[2][1].item<float>(), 5.0F);
    EXPECT_TRUE(buckets_.take_edits(true).empty());
  }
}

}  // namespace
}  // namespace pannier
