#include "pannier/plan/update_route.h"

#include <gmock/gmock.h>

#include <limits>

#include "pannier/base/error.h"

namespace pannier {
namespace {

constexpr auto kDevice = UpdateRoute::kDevice;
constexpr auto kStreamed = UpdateRoute::kStreamed;
constexpr auto kHost = UpdateRoute::kHost;

TEST(AssignRoutes, GivesTheHostTheFirstOfBackwardAndTheDeviceTheLast) {
  const std::vector<std::int64_t> numels{10, 10, 10, 10, 10};
  EXPECT_THAT(assign_routes(numels, {.device = 0.2, .host = 0.4}),
              testing::ElementsAre(kHost, kHost, kStreamed, kStreamed, kDevice));
  EXPECT_THAT(assign_routes(numels, {}), testing::Each(kStreamed));
  EXPECT_THAT(assign_routes(numels, {.host = 1.0}), testing::Each(kHost));
  EXPECT_THAT(assign_routes(numels, {.device = 1.0}), testing::Each(kDevice));
}

TEST(AssignRoutes, TakesTheNearestNumberOfBuckets) {
  const std::vector<std::int64_t> numels(10, 100);
  for (int percent = 0; percent <= 100; ++percent) {
    const auto routes = assign_routes(numels, {.host = percent / 100.0});
    const auto on_host = std::count(routes.begin(), routes.end(), kHost);
    EXPECT_LE(std::abs(static_cast<double>(on_host) - percent / 10.0), 0.5 + 1e-9) << percent;
  }
}

TEST(AssignRoutes, NeverKeepsMoreOnTheDeviceThanAsked) {
  const std::vector<std::int64_t> numels{100, 30, 30};
  EXPECT_THAT(assign_routes(numels, {.device = 0.3}), testing::ElementsAre(kStreamed, kStreamed, kDevice));
  EXPECT_THAT(assign_routes(numels, {.device = 0.1}), testing::Each(kStreamed));
}

TEST(AssignRoutes, NeverStreamsMoreThanTheRoomHolds) {
  const std::vector<std::int64_t> numels{100, 100, 100};
  EXPECT_THAT(assign_routes(numels, {.host = 0.4, .most_streamed_numel = 180}),
              testing::ElementsAre(kHost, kHost, kStreamed));
  EXPECT_THAT(assign_routes(numels, {.most_streamed_numel = 0}), testing::Each(kHost));
}

TEST(AssignRoutes, LivesWithNoBucketsAndEmptyOnes) {
  EXPECT_TRUE(assign_routes({}, {.host = 0.5}).empty());
  const std::vector<std::int64_t> empty{0, 0};
  EXPECT_THAT(assign_routes(empty, {}), testing::Each(kStreamed));
}

TEST(AssignRoutes, RefusesSharesThatCannotBe) {
  const std::vector<std::int64_t> numels{1};
  EXPECT_THROW((void)assign_routes(numels, {.host = 1.5}), ConfigError);
  EXPECT_THROW((void)assign_routes(numels, {.device = -0.1}), ConfigError);
  EXPECT_THROW((void)assign_routes(numels, {.device = 0.6, .host = 0.6}), ConfigError);
  EXPECT_THROW((void)assign_routes(numels, {.host = std::numeric_limits<double>::quiet_NaN()}), ConfigError);
  EXPECT_THROW((void)assign_routes(numels, {.most_streamed_numel = -1}), ConfigError);
}

}  // namespace
}  // namespace pannier
