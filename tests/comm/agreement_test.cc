#include "pannier/comm/agreement.h"

#include <gmock/gmock.h>

#include <functional>
#include <thread>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/comm/collective_error.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

/// What each rank threw while it compared; empty for a rank that threw nothing.
template <class Error>
std::vector<std::string> errors_of(int world_size, const std::function<void(Agreement&, int)>& body,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  MemoryStore store;
  std::vector<std::string> errors(static_cast<std::size_t>(world_size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Agreement agreement(store.clone(), std::make_shared<GroupState>(), rank, world_size, timeout);
      try {
        body(agreement, rank);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

TEST(Agreement, EqualTextsPass) {
  const auto errors = errors_of<std::exception>(4, [](Agreement& agreement, int) {
    agreement.agree("the configuration", "{\n  \"stage\": 2\n}\n");
    agreement.agree("the parameters", "");
  });
  EXPECT_THAT(errors, Each(std::string()));
}

TEST(Agreement, NamesTheFirstRankAndLineThatDiffer) {
  const auto errors = errors_of<ConfigError>(4, [](Agreement& agreement, int rank) {
    agreement.agree("the configuration", rank < 2 ? "a\nlr 1e-3\nc" : "a\nlr 1e-4\nd");
  });
  EXPECT_THAT(errors, Each("rank 2 differs from rank 0 in the configuration: line 2: 'lr 1e-3' on rank 0, 'lr 1e-4' on "
                           "rank 2"));
}

TEST(Agreement, NamesDifferentQuestions) {
  const auto errors = errors_of<ConfigError>(2, [](Agreement& agreement, int rank) {
    agreement.agree(rank == 0 ? "the configuration" : "the layout", "same");
  });
  EXPECT_THAT(errors, Each("rank 1 compares the layout where rank 0 compares the configuration"));
}

TEST(Agreement, NamesTheRanksThatDoNotCome) {
  const auto body = [](Agreement& agreement, int rank) {
    if (rank == 0 || rank == 2) {
      agreement.agree("the layout", "x");
    }
  };
  const auto errors = errors_of<CollectiveError>(4, body, std::chrono::milliseconds(1000));
  EXPECT_THAT(errors[0], HasSubstr("ranks 1, 3 have not come"));
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(Agreement, NamesRankZeroWhereItDoesNotCome) {
  const auto body = [](Agreement& agreement, int rank) {
    if (rank != 0) {
      agreement.agree("the layout", "x");
    }
  };
  EXPECT_THAT(errors_of<CollectiveError>(2, body, std::chrono::milliseconds(20))[1],
              HasSubstr("rank 0 has not come after 0.02 s"));
}

TEST(FirstDifference, ShowsWhereALongLineDiffers) {
  const std::string long_text(10'000, 'x');
  EXPECT_THAT(first_difference(long_text + "left", long_text + "right", "A", "B"),
              AllOf(HasSubstr("xxleft' on A"), HasSubstr("xxright' on B")));
  EXPECT_LT(first_difference(long_text + "left", long_text + "right", "A", "B").size(), 400U);
  EXPECT_EQ(first_difference("a\nb", "a", "A", "B"), "line 2: 'b' on A, nothing on B");
  EXPECT_EQ(first_difference("a", "a\nb", "A", "B"), "line 2: 'b' on B, nothing on A");
  EXPECT_EQ(first_difference("a\n", "a", "A", "B"), "the last line ends differently on A and B");
  EXPECT_EQ(first_difference("a", "a", "A", "B"), "");
}

TEST(Agreement, SharesEveryRanksText) {
  const auto errors = errors_of<std::exception>(3, [](Agreement& agreement, int rank) {
    const auto texts = agreement.share_texts("a tag", "of\n" + std::to_string(rank));
    EXPECT_THAT(texts, ::testing::ElementsAre("of\n0", "of\n1", "of\n2"));
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Agreement, SharingNamesRanksThatHaveNotCome) {
  const auto body = [](Agreement& agreement, int rank) {
    if (rank != 1) {
      (void)agreement.share_texts("a tag", "x");
    }
  };
  const auto errors = errors_of<CollectiveError>(3, body, std::chrono::milliseconds(200));
  EXPECT_THAT(errors[0], HasSubstr("sharing a tag over ranks: rank 1 has not come after 0.2 s"));
  EXPECT_EQ(errors[1], "");
  EXPECT_THAT(errors[2], HasSubstr("rank 1 has not come"));
}

}  // namespace
}  // namespace pannier
