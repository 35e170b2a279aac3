#include "pannier/comm/monitor.h"

#include <gmock/gmock.h>

#include <memory>
#include <thread>
#include <vector>

#include "pannier/comm/collective_error.h"
#include "pannier/comm/mailbox.h"
#include "pannier/comm/rank_status.h"

namespace pannier {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr auto kWatchdog = std::chrono::seconds(60);
const Label kGather{OperationKind::kParameters, 17, 1};
const Label kReduce{OperationKind::kGradients, 17, 3};

/// Some ranks over one store, each with a monitor of its own.
class Ranks {
 public:
  explicit Ranks(int world_size, milliseconds heartbeat_timeout = milliseconds(60'000)) {
    for (int rank = 0; rank < world_size; ++rank) {
      states.push_back(std::make_shared<GroupState>());
      monitors.push_back(std::make_unique<Monitor>(store.clone(), states.back(), rank, world_size,
                                                   MonitorOptions{milliseconds(1), heartbeat_timeout}));
    }
  }
  ~Ranks() {
    for (const auto& monitor : monitors) {
      if (monitor) {
        monitor->close();
      }
    }
  }

  /// Waits for the rank's group to be dead.
  std::string failure(std::size_t rank) {
    const auto never = [] { return false; };
    EXPECT_EQ(states[rank]->wait(GroupState::Clock::now() + kWatchdog, never), GroupState::Outcome::kFailed);
    return states[rank]->failure().value_or("none");
  }
  /// Waits for the others to be able to see that the rank has begun this operation.
  void reach(std::size_t rank, std::uint32_t sequence, const Label& label) {
    monitors[rank]->reached(sequence, label);
    const auto is_published = [&] {
      const auto text = store.get("rank/" + std::to_string(rank));
      return text && RankStatus::from_text(*text)->num_begun == sequence + 1;
    };
    EXPECT_TRUE(states[rank]->wait_despite_failure(GroupState::Clock::now() + kWatchdog, is_published));
  }

  MemoryStore store;
  std::vector<std::shared_ptr<GroupState>> states;
  std::vector<std::unique_ptr<Monitor>> monitors;
};

TEST(RankStatus, SurvivesItsText) {
  const RankStatus status{.beat = 5, .has_left = true, .num_begun = 7, .label = {OperationKind::kVotes, 9, -2}};
  const auto read = RankStatus::from_text(status.to_text());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->to_text(), status.to_text());
  EXPECT_EQ(read->label, status.label);
  EXPECT_FALSE(RankStatus::from_text("nonsense").has_value());
}

TEST(Monitor, TellsAFailureToEveryRank) {
  Ranks ranks(3);
  ranks.monitors[1]->report_failure("no space left");
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ranks.failure(rank), "rank 1 failed: no space left");
  }
  EXPECT_THROW(ranks.states[0]->throw_if_failed("a wait"), CollectiveError);
}

TEST(Monitor, TheFirstFailureIsEveryones) {
  Ranks ranks(4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    ranks.monitors[rank]->report_failure("mine");
  }
  const std::string first = ranks.failure(0);
  for (std::size_t rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(ranks.failure(rank), first);
  }
}

TEST(Monitor, OverDeadlineNamesTheRankThatIsMissing) {
  Ranks ranks(3);
  ranks.reach(0, 5, kReduce);
  ranks.reach(1, 5, kReduce);
  ranks.reach(2, 4, kGather);
  ranks.monitors[0]->report_overdue(5, kReduce, 30);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ranks.failure(rank),
              "rank 2 has not reached gradient exchange of bucket 3, step 17 (last seen: parameter gather of bucket 1, "
              "step 17) after 30 s on rank 0");
  }
}

TEST(Monitor, OverDeadlineNamesTheRankThatLeft) {
  Ranks ranks(2);
  ranks.monitors[1]->close();
  ranks.reach(0, 0, kReduce);
  ranks.monitors[0]->report_overdue(0, kReduce, 1);
  EXPECT_THAT(ranks.failure(0), HasSubstr("rank 1 left the group without gradient exchange of bucket 3, step 17"));
}

TEST(Monitor, NamesTheRankWhoseHeartbeatStopped) {
  Ranks ranks(2, milliseconds(50));
  // A rank that was there and is no more: its line never changes.
  ranks.monitors[1]->close();
  ranks.store.set("rank/1", RankStatus{.beat = 100}.to_text());
  EXPECT_EQ(ranks.failure(0), "rank 1 died (no heartbeat for 0.05 s)");
  EXPECT_EQ(ranks.store.get("failure"), "rank 1 died (no heartbeat for 0.05 s)");
}

TEST(Monitor, ARankThatLeftIsNotDead) {
  Ranks ranks(2, milliseconds(20));
  ranks.monitors[1]->close();
  // Many more beats of the others than a death would take.
  const auto beats = [&] { return RankStatus::from_text(ranks.store.get("rank/0").value_or("0 0 0 0 0 0"))->beat; };
  EXPECT_TRUE(
      ranks.states[0]->wait_despite_failure(GroupState::Clock::now() + kWatchdog, [&] { return beats() > 100; }));
  EXPECT_FALSE(ranks.states[0]->failure().has_value());
}

TEST(Monitor, SeesDifferentOperationsUnderOneNumber) {
  Ranks ranks(2);
  ranks.monitors[0]->reached(3, kGather);
  ranks.monitors[1]->reached(3, kReduce);
  const std::string failure = ranks.failure(0);
  EXPECT_THAT(failure, HasSubstr("rank 0"));
  EXPECT_THAT(failure, HasSubstr("rank 1"));
  EXPECT_THAT(failure, HasSubstr("parameter gather of bucket 1, step 17"));
  EXPECT_THAT(failure, HasSubstr("gradient exchange of bucket 3, step 17"));
  EXPECT_EQ(ranks.failure(1), failure);
}

/// A store whose keeper is gone.
class LostStore final : public KeyValueStore {
 public:
  void set(const std::string& /*key*/, const std::string& /*value*/) override { throw std::runtime_error("gone"); }
  [[nodiscard]] std::optional<std::string> get(const std::string& /*key*/) override {
    throw std::runtime_error("gone");
  }
  std::int64_t add(const std::string& /*key*/, std::int64_t /*amount*/) override { throw std::runtime_error("gone"); }
  [[nodiscard]] std::unique_ptr<KeyValueStore> clone() override { return std::make_unique<LostStore>(); }
};

TEST(Monitor, ALostStoreIsAFailure) {
  const auto state = std::make_shared<GroupState>();
  Monitor monitor(std::make_unique<LostStore>(), state, 1, 2, {milliseconds(1), milliseconds(1000)});
  EXPECT_EQ(state->wait(GroupState::Clock::now() + kWatchdog, [] { return false; }), GroupState::Outcome::kFailed);
  EXPECT_THAT(*state->failure(), HasSubstr("the store of the group cannot be reached"));
  monitor.close();
}

TEST(Monitor, ALostConnectionSaysMoreThanALostStore) {
  const auto state = std::make_shared<GroupState>();
  Monitor monitor(std::make_unique<LostStore>(), state, 1, 2, {milliseconds(1), milliseconds(1000)});
  monitor.report_lost(0, "an exchange", "closed by peer");
  monitor.wait_until_failed("nothing came");
  EXPECT_THAT(*state->failure(), HasSubstr("rank 0 died or left: its connection to rank 1 ended during an exchange"));
  monitor.close();
}

TEST(GroupState, ReadyWinsOverFailed) {
  GroupState state;
  state.fail("first");
  state.fail("second");
  const auto later = GroupState::Clock::now() + kWatchdog;
  EXPECT_EQ(state.wait(later, [] { return true; }), GroupState::Outcome::kReady);
  EXPECT_EQ(state.wait(later, [] { return false; }), GroupState::Outcome::kFailed);
  EXPECT_EQ(state.failure(), "first");
}

TEST(GroupState, CallsItsHandlerOnceWhenItFails) {
  GroupState state;
  int calls = 0;
  state.on_failure([&] { ++calls; });
  state.fail("a");
  state.fail("b");
  EXPECT_EQ(calls, 1);
  state.on_failure([&] { ++calls; });
  EXPECT_EQ(calls, 2);
}

TEST(Mailbox, WakesWhoWaitsForALetter) {
  const auto state = std::make_shared<GroupState>();
  Mailbox mailbox(state);
  std::jthread sender([&] { mailbox.post(2, 1, {.header = {}, .bytes = std::vector<std::byte>(3)}); });
  const auto later = GroupState::Clock::now() + kWatchdog;
  EXPECT_EQ(state->wait(later, [&] { return mailbox.has(2, 1); }), GroupState::Outcome::kReady);
  EXPECT_EQ(mailbox.take(2, 1).bytes.size(), 3U);
}

}  // namespace
}  // namespace pannier
