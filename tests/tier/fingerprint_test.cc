#include "pannier/tier/fingerprint.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

namespace pannier {
namespace {

std::int64_t of(const at::Tensor& tensor) { return fingerprints({tensor.contiguous().view({-1})}).front(); }

TEST(Fingerprint, IsThatOfTheBits) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kByte}) {
    const at::Tensor values = at::arange(100'000).remainder(251).to(dtype);
    const std::int64_t before = of(values);
    EXPECT_EQ(of(values.clone()), before);
    for (const std::int64_t index : {0, 1, 16'383, 16'384, 99'999}) {
      const at::Tensor edited = values.clone();
      edited[index].add_(1);
      EXPECT_NE(of(edited), before) << index;
    }
    EXPECT_NE(of(values.flip(0)), before);
    EXPECT_NE(of(values.roll(16'384)), before) << "chunks that changed places";
    EXPECT_NE(of(values.neg()), before);
  }
  EXPECT_NE(of(at::tensor({0.0F, 0.0F})), of(at::tensor({-0.0F, 0.0F})));
}

TEST(Fingerprint, OfSeveralIsThatOfEach) {
  const at::Tensor one = at::ones({7});
  const at::Tensor none = at::empty({0});
  EXPECT_EQ(fingerprints({one, none, one}), (std::vector<std::int64_t>{of(one), of(none), of(one)}));
  EXPECT_TRUE(fingerprints({}).empty());
}

}  // namespace
}  // namespace pannier
