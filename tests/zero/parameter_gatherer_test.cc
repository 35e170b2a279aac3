#include "pannier/zero/parameter_gatherer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

#include <ostream>
#include <tuple>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"
#include "pannier/zero/bucket_names.h"
#include "pannier/zero/parts_plan.h"
#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(UnitOrder, LooksAheadWhereTheLastWindowWent) {
  UnitOrder order;
  for (const int unit : {1, 2, 3, 2, 1}) {
    order.saw(unit);
    EXPECT_TRUE(order.ahead().empty());
  }
  order.end_window();
  order.saw(1);
  EXPECT_THAT(order.ahead(), ElementsAre(2, 3, 2, 1));
  order.saw(3);  // One was left out.
  EXPECT_THAT(order.ahead(), ElementsAre(2, 1));
  order.saw(7);  // Never seen.
  EXPECT_TRUE(order.ahead().empty());
  order.saw(1);  // Back where it fits.
  EXPECT_THAT(order.ahead(), ElementsAre(2, 3, 2, 1));
}

/// One rank's part of three parameters, each a unit and a bucket of its own; the last one is small and stays whole.
class Rank {
 public:
  Rank(Communicator& communicator, Home home, std::int64_t prefetch_numel = 0, int node_size = 0)
      : shards_(layout_, communicator.rank(), communicator.world_size(), node_size), exchange_(shards_, communicator) {
    communicator.explain_failures(bucket_names(layout_, {"a", "b", "small"}));
    for (int b = 0; b < layout_.num_buckets(); ++b) {
      buckets_.fill(b, [&](const Segment& segment, const at::Tensor& values) {
        buckets_.bucket(b).narrow(0, segment.offset, segment.numel).copy_(values);
      });
    }
    const auto make_shards = [&](std::vector<std::int64_t> numels) {
      numels.back() = 0;
      return home == Home::kHost ? make_host_shards(*device_, memory_, up_, down_, shards_of_type(at::kFloat, numels))
                                 : make_device_shards(*device_, shards_of_type(at::kFloat, numels));
    };
    rest_ = make_shards(shards_.numels());
    const std::vector<std::int64_t> for_node = node_numels_of(shards_);
    gathering_ = for_node.empty() ? make_flat_gathering(shards_, exchange_, *rest_)
                                  : make_node_gathering(shards_, exchange_, *rest_, make_shards(for_node));
    gatherer_ =
        std::make_unique<ParameterGatherer>(ParameterGathererParts{*device_, shards_, buckets_, *gathering_, *rest_},
                                            ParameterGathererOptions{{{}, {0}, {1}, {2}}, prefetch_numel});
    for (int b = 0; b < layout_.num_buckets(); ++b) {
      gatherer_->keep(b);
      gatherer_->let_rest(b);
    }
  }
  ~Rank() {
    up_.close();
    down_.close();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  [[nodiscard]] ParameterGatherer& gatherer() { return *gatherer_; }
  /// What this rank owns of a parameter's bucket is multiplied where it rests, as an update does.
  void multiply_own(int parameter, float factor) {
    const int bucket = bucket_of(parameter);
    gatherer_->own(bucket).mul_(factor);
    gatherer_->put_back(bucket);
  }
  [[nodiscard]] bool is_whole(int parameter) const { return gatherer_->is_whole(layout_.bucket_of(parameter)); }
  [[nodiscard]] float sum(int parameter) const {
    return parameters_[static_cast<std::size_t>(parameter)].sum().item<float>();
  }
  [[nodiscard]] int bucket_of(int parameter) const { return layout_.bucket_of(parameter); }
  [[nodiscard]] at::Tensor& parameter(int index) { return parameters_[static_cast<std::size_t>(index)]; }

 private:
  std::unique_ptr<Device> device_ = make_metered_cpu();
  HostMemory memory_;
  Mover up_{*device_, Queue::kUp, {.piece_nbytes = 4096, .depth = 2, .delay_seed = 3}};
  Mover down_{*device_, Queue::kDown, {.piece_nbytes = 4096, .depth = 2, .delay_seed = 4}};
  std::vector<at::Tensor> parameters_{at::ones({2, 10000}), at::full({9000}, 2.0F), at::full({5}, 3.0F)};
  std::vector<std::int64_t> numels_{20000, 9000, 5};
  std::vector<int> groups_{1, 2, kLastGroup};
  BucketLayout layout_{numels_, {}, groups_};
  ShardLayout shards_;
  ShardExchange exchange_;
  ParameterBuckets buckets_{*device_, layout_, parameters_, {"a", "b", "small"}, at::kFloat};
  std::unique_ptr<ParameterShards> rest_;
  std::unique_ptr<ShardGathering> gathering_;
  std::unique_ptr<ParameterGatherer> gatherer_;
};

struct Ranks {
  int world_size = 1;
  int node_size = 0;
};
void PrintTo(const Ranks& ranks, std::ostream* out) { *out << ranks.world_size << " in nodes of " << ranks.node_size; }

/// By ranks and home.
class ParameterGathererTest : public ::testing::TestWithParam<std::tuple<Ranks, Home>> {
 protected:
  int world_size_ = std::get<0>(GetParam()).world_size;
  int node_size_ = std::get<0>(GetParam()).node_size;
  Home home_ = std::get<1>(GetParam());
};

TEST_P(ParameterGathererTest, AUnitIsWholeWhileItRunsAndRefusesToBeReadElse) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 0, node_size_);
    EXPECT_EQ(rank.sum(2), 15.0F);
    EXPECT_THAT(message_of([&] { (void)rank.sum(0); }), HasSubstr("parameter a was read while it was partitioned"));
    rank.gatherer().begin_forward(1);
    EXPECT_EQ(rank.sum(0), 20000.0F);
    EXPECT_FALSE(rank.is_whole(1));
    rank.gatherer().begin_forward(1);  // Called inside itself.
    rank.gatherer().end_forward(1);
    EXPECT_EQ(rank.sum(0), 20000.0F);
    rank.gatherer().end_forward(1);
    EXPECT_FALSE(rank.is_whole(0));
  });
}

TEST_P(ParameterGathererTest, ViewsTakenInForwardSeeTheValuesThatBackwardGathers) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 0, node_size_);
    rank.gatherer().begin_forward(1);
    const at::Tensor saved = rank.parameter(0).t();
    rank.gatherer().end_forward(1);
    rank.gatherer().begin_backward(1);
    EXPECT_EQ(saved.sum().item<float>(), 20000.0F);
    rank.gatherer().end_backward(1);
    EXPECT_FALSE(rank.is_whole(0));
    rank.gatherer().finish_backward();
    rank.gatherer().rest_all();
    EXPECT_THAT(message_of([&] { (void)saved.sum(); }), HasSubstr("a view of parameter a"));
  });
}

TEST_P(ParameterGathererTest, WhatIsReadOutsideOfItsUnitStaysUntilTheModelHasRun) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 0, node_size_);
    ParameterGatherer& gatherer = rank.gatherer();
    gatherer.use(1);
    EXPECT_FALSE(rank.is_whole(1)) << "nobody runs";
    gatherer.begin_forward(0);
    gatherer.use(1);
    EXPECT_EQ(rank.sum(1), 18000.0F);
    gatherer.end_forward(0);
    EXPECT_FALSE(rank.is_whole(1));
    EXPECT_THAT(gatherer.begin_backward(0), ElementsAre(rank.bucket_of(1)));
    EXPECT_TRUE(rank.is_whole(1));
    gatherer.finish_backward();
    EXPECT_FALSE(rank.is_whole(1));
    // Its own unit leaves it whole for the rest of the forward.
    gatherer.begin_forward(0);
    gatherer.begin_forward(2);
    gatherer.end_forward(2);
    EXPECT_TRUE(rank.is_whole(1));
    gatherer.end_forward(0);
    EXPECT_FALSE(rank.is_whole(1));
  });
}

TEST_P(ParameterGathererTest, EditsOfAWholeParameterAreKept) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 0, node_size_);
    rank.gatherer().hold({0});
    rank.parameter(0).fill_(5);
    const at::Tensor kept = rank.parameter(0).detach();
    EXPECT_TRUE(rank.gatherer().is_held());
    rank.gatherer().let_go({0});
    EXPECT_FALSE(rank.is_whole(0));
    EXPECT_THAT(message_of([&] { (void)kept.sum(); }), HasSubstr("a view of parameter a"));
    EXPECT_THAT(rank.gatherer().take_edited(), ElementsAre(0));
    EXPECT_TRUE(rank.gatherer().take_edited().empty());
    rank.gatherer().make_whole(rank.bucket_of(0));
    EXPECT_EQ(rank.sum(0), 100000.0F);
  });
}

TEST_P(ParameterGathererTest, EveryRankSeesWhatTheOthersUpdated) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 0, node_size_);
    float expected = 20000.0F;
    for (int step = 0; step < 3; ++step) {
      rank.gatherer().rest_all();
      rank.multiply_own(0, 2.0F);
      expected *= 2.0F;
      for (int unit_call = 0; unit_call < 2; ++unit_call) {
        rank.gatherer().begin_forward(1);
        EXPECT_EQ(rank.sum(0), expected);
        rank.gatherer().end_forward(1);
      }
      rank.gatherer().end_window();
    }
  });
}

TEST_P(ParameterGathererTest, AWrongGuessOfWhatComesNextCostsNothingButBytes) {
  testing::run_ranks(world_size_, [this](Communicator& communicator) {
    Rank rank(communicator, home_, 1'000'000, node_size_);
    ParameterGatherer& gatherer = rank.gatherer();
    const auto run = [&](std::vector<int> units) {
      for (const int unit : units) {
        gatherer.begin_forward(unit);
        EXPECT_EQ(rank.sum(unit - 1), unit == 1 ? 20000.0F : 18000.0F);
        gatherer.end_forward(unit);
      }
      gatherer.rest_all();
      gatherer.end_window();
    };
    run({1, 2, 1});
    run({1, 1, 2});
    run({2, 2});
    run({1});
  });
}

INSTANTIATE_TEST_SUITE_P(WorldsAndHomes, ParameterGathererTest,
                         ::testing::Combine(::testing::Values(Ranks{1}, Ranks{2}, Ranks{3}, Ranks{7}, Ranks{4, 2},
                                                              Ranks{6, 3}, Ranks{6, 2}, Ranks{12, 4}),
                                            ::testing::Values(Home::kDevice, Home::kHost)));

TEST(ParameterGatherer, RanksThatGatherDifferentUnitsAreToldWhichWeights) {
  ThreadGroup group(2);
  const auto errors = testing::run_each(group, [](Communicator& communicator) {
    Rank rank(communicator, Home::kDevice);
    rank.gatherer().begin_forward(communicator.rank() + 1);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error != nullptr);
    try {
      std::rethrow_exception(error);
    } catch (const CollectiveError& caught) {
      EXPECT_THAT(caught.what(), HasSubstr("bucket 0 holds b"));
      EXPECT_THAT(caught.what(), HasSubstr("bucket 1 holds a"));
    }
  }
}

}  // namespace
}  // namespace pannier
