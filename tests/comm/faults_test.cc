// What goes wrong between ranks, and what each of them is told.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"
#include "pannier/comm/stamp_checker.h"
#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_each;
using testing::run_ranks;

ExchangeBuffers equal_pieces(const Communicator& group, std::int64_t nbytes) {
  const ExchangeLayout layout(group.rank(),
                              std::vector<std::int64_t>(static_cast<std::size_t>(group.world_size()), nbytes));
  const auto make = [&] { return message_views(at::zeros({layout.total_nbytes()}, at::kByte), layout); };
  return {.send = make(), .receive = make()};
}

void exchange(Communicator& group, const Label& label, std::int64_t nbytes = 64) {
  group.exchange(label, equal_pieces(group, nbytes))->wait();
}

std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const CollectiveError& exception) {
    return exception.what();
  }
  return "nothing was thrown";
}

std::vector<std::string> what_each_rank_threw(int world_size, const std::function<void(Communicator&)>& body,
                                              GroupOptions options = thread_group_options()) {
  ThreadGroup group(world_size, options);
  std::vector<std::string> texts;
  for (const auto& error : run_each(group, body)) {
    texts.push_back(text_of(error));
  }
  return texts;
}

// Two branches of equal size, taken in different order: without stamps both ranks would go on with half of each.
TEST(Faults, RanksInDifferentBranchesAreBothTold) {
  const auto texts = what_each_rank_threw(
      2, [](Communicator& group) { exchange(group, {OperationKind::kParameters, 4, group.rank() == 0 ? 7 : 8}); });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("parameter gather of bucket 7, step 4"),
                            HasSubstr("parameter gather of bucket 8, step 4")));
  }
}

TEST(Faults, StampsApartTellBranchesFromEachOtherToo) {
  const auto texts = what_each_rank_threw(2, [](Communicator& group) {
    ExchangeBuffers buffers = equal_pieces(group, 64);
    buffers.stamps = StampPlace::kApart;
    group.exchange({OperationKind::kParameters, 4, group.rank() == 0 ? 7 : 8}, buffers)->wait();
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, AllOf(HasSubstr("parameter gather of bucket 7, step 4"),
                            HasSubstr("parameter gather of bucket 8, step 4")));
  }
}

TEST(Faults, DifferentSizesNameBothRanks) {
  const auto texts = what_each_rank_threw(
      2, [](Communicator& group) { exchange(group, {OperationKind::kGradients, 4, 7}, group.rank() == 0 ? 64 : 128); });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, AllOf(HasSubstr("gradient exchange of bucket 7, step 4"), HasSubstr("144"), HasSubstr("80"),
                            HasSubstr("rank 0"), HasSubstr("rank 1")));
  }
}

TEST(Faults, ARankThatRunsBehindIsNamed) {
  const auto texts = what_each_rank_threw(3, [](Communicator& group) {
    for (std::uint32_t step = group.rank() == 1 ? 1 : 0; step < 3; ++step) {
      exchange(group, {OperationKind::kGradients, step, 0});
    }
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("rank 1"));
  }
}

TEST(Faults, TheDeadlineNamesWhoIsMissing) {
  GroupOptions options = thread_group_options();
  options.collective_timeout = std::chrono::seconds(2);
  const auto texts = what_each_rank_threw(
      3,
      [](Communicator& group) {
        exchange(group, {OperationKind::kParameters, 16, 1});
        if (group.rank() != 2) {
          exchange(group, {OperationKind::kGradients, 17, 3});
        }
      },
      options);
  for (const std::size_t rank : {0U, 1U}) {
    EXPECT_THAT(texts[rank], HasSubstr("rank 2 has not reached gradient exchange of bucket 3, step 17 (last seen: "
                                       "parameter gather of bucket 1, step 16) after 2 s"));
  }
}

TEST(Faults, AFailureWakesEveryWaiterAndStaysForGood) {
  ThreadGroup group(3);
  run_each(group, [](Communicator& rank) {
    if (rank.rank() == 1) {
      rank.report_failure("disk full");
    }
    for (int i = 0; i < 2; ++i) {
      try {
        std::vector<std::int64_t> values(3);
        rank.sum(values);
        ADD_FAILURE() << "the sum came to its end";
      } catch (const CollectiveError& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 failed: disk full"));
      }
    }
    EXPECT_THROW(rank.check(), CollectiveError);
    EXPECT_THROW(rank.agree("anything", "x"), CollectiveError);
  });
}

TEST(Faults, ARankThatThrowsFailsTheOthers) {
  try {
    run_ranks(4, [](Communicator& group) {
      if (group.rank() == 2) {
        throw ConfigError("rank 2's own");
      }
      exchange(group, {OperationKind::kGradients, 1, 1});
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "rank 2's own");
  }
}

TEST(Faults, DifferingTextsAreAConfigErrorOnEveryRank) {
  ThreadGroup group(3);
  run_each(group, [](Communicator& rank) {
    rank.agree("the layout", "same");
    try {
      rank.agree("the configuration", rank.rank() == 1 ? "stage 2\nlr 2" : "stage 2\nlr 1");
      ADD_FAILURE() << "rank " << rank.rank() << " agreed";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1 differs from rank 0 in the configuration: line 2: 'lr 1'"));
    }
    // Nothing has travelled: the group itself is whole.
    exchange(rank, {OperationKind::kGradients, 1, 1});
  });
}

TEST(Faults, NothingFollowsAClose) {
  ThreadGroup group(1);
  group.communicator(0).close();
  EXPECT_THROW(group.communicator(0).check(), InternalError);
}

TEST(StampChecker, SeesEveryFieldOnADevice) {
  const auto checker = make_torch_stamp_checker();
  const Stamp right = make_stamp({OperationKind::kParameters, 17, 3}, 2, 9);
  const auto is_wrong = [&](const Stamp& stamp) {
    const at::Tensor first = at::zeros({32}, at::kByte);
    const at::Tensor second = at::zeros({64}, at::kByte);
    Stamp other = right;
    other.source = 1;
    checker->write(first, other);
    checker->write(second, stamp);
    EXPECT_EQ(read_stamp(second), stamp);
    return checker->check({{first, other}, {second, right}}).item<bool>();
  };
  EXPECT_FALSE(is_wrong(right));
  EXPECT_TRUE(is_wrong(make_stamp({OperationKind::kGradients, 17, 3}, 2, 9)));
  EXPECT_TRUE(is_wrong(make_stamp({OperationKind::kParameters, 18, 3}, 2, 9)));
  EXPECT_TRUE(is_wrong(make_stamp({OperationKind::kParameters, 17, -3}, 2, 9)));
  EXPECT_TRUE(is_wrong(make_stamp({OperationKind::kParameters, 17, 3}, 2, 10)));
}

}  // namespace
}  // namespace pannier
