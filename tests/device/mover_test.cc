#include "pannier/device/mover.h"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "pannier/base/error.h"
#include "tests/device/watched_device.h"

namespace pannier {
namespace {

/// Bytes to copy from and to.
struct Bytes {
  explicit Bytes(std::size_t nbytes) : from(nbytes), to(nbytes) { std::iota(from.begin(), from.end(), '\0'); }
  [[nodiscard]] CopyRun run(std::size_t begin, std::size_t nbytes) { return {&to[begin], &from[begin], nbytes}; }
  std::vector<char> from, to;
};

class MoverTest : public testing::Test {
 protected:
  /// Every copy waits until go() was called.
  void hold() {
    device_.before_copy = [gate = go_.get_future().share()](Queue, void*, std::size_t) { gate.wait(); };
  }
  /// The same, and notes where copies go and that the first has begun; `look` sees each before it waits.
  void hold_and_note(std::function<void(const void* to)> look = [](const void*) {}) {
    device_.before_copy = [this, look, gate = go_.get_future().share()](Queue, void* to, std::size_t) {
      if (seen_.empty()) {
        begun_.set_value();
      }
      look(to);
      seen_.push_back(to);
      gate.wait();
    };
  }
  void go() { go_.set_value(); }

  WatchedDevice device_;
  std::promise<void> go_;
  std::promise<void> begun_;
  std::vector<void*> seen_;
  Bytes bytes_{100};
};

TEST_F(MoverTest, CopiesRunsInOrderInPieces) {
  std::vector<std::pair<void*, std::size_t>> seen;
  device_.before_copy = [&seen](Queue, void* to, std::size_t nbytes) { seen.emplace_back(to, nbytes); };
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 16});
  const TransferPtr first = mover.push({bytes_.run(0, 40), bytes_.run(40, 0), bytes_.run(40, 10)}, {});
  const TransferPtr second = mover.push({bytes_.run(50, 50)}, {});
  second->wait_done();
  EXPECT_TRUE(first->is_done());
  EXPECT_EQ(bytes_.to, bytes_.from);
  std::vector<std::pair<void*, std::size_t>> expected;
  for (const auto& [begin, nbytes] : std::vector<std::pair<std::size_t, std::size_t>>{
           {0, 16}, {16, 16}, {32, 8}, {40, 10}, {50, 16}, {66, 16}, {82, 16}, {98, 2}}) {
    expected.emplace_back(&bytes_.to[begin], nbytes);
  }
  EXPECT_EQ(seen, expected);
}

TEST_F(MoverTest, CountsWhatItCarriedAndForHowLong) {
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 16});
  EXPECT_EQ(mover.work_done().nbytes, 0.0);
  EXPECT_EQ(mover.work_done().busy_s, 0.0);
  mover.push({bytes_.run(0, 40)}, {})->wait_done();
  mover.push({bytes_.run(40, 60)}, {})->wait_done();
  mover.close();
  const MoverWork work = mover.work_done();
  EXPECT_EQ(work.nbytes, 100.0);
  EXPECT_GT(work.busy_s, 0.0);
  EXPECT_EQ(mover.work_done().busy_s, work.busy_s);  // Nothing is on its way.
}

TEST_F(MoverTest, AHeldMoverIssuesNothingUntilItMayGoOn) {
  std::atomic<int> num_copies{0};
  device_.before_copy = [&](Queue, void*, std::size_t) { ++num_copies; };
  Mover mover(device_, Queue::kUp, {});
  mover.hold(std::chrono::hours(1));
  const TransferPtr transfer = mover.push({bytes_.run(0, 100)}, {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(num_copies, 0);
  EXPECT_FALSE(transfer->is_issued());
  mover.go_on();
  transfer->wait_done();
  EXPECT_TRUE(transfer->is_issued());
  mover.hold(std::chrono::microseconds(100));  // Goes on by itself.
  mover.push({bytes_.run(0, 100)}, {})->wait_done();
  mover.hold(std::chrono::hours(1));
  const TransferPtr last = mover.push({bytes_.run(0, 100)}, {});
  mover.close();  // So does one that ends.
  EXPECT_TRUE(last->is_done());
}

TEST_F(MoverTest, AnUrgentTransferGoesAheadOfWhatWaitsAndBetweenPiecesOfWhatRuns) {
  hold_and_note();
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 10});
  const TransferPtr first = mover.push({bytes_.run(0, 30)}, {});
  const TransferPtr second = mover.push({bytes_.run(30, 10)}, {});
  begun_.get_future().wait();
  const TransferPtr urgent = mover.push_urgent({bytes_.run(40, 60)}, {}, nullptr, "test", 0);
  go();
  urgent->wait_done();
  second->wait_done();
  EXPECT_TRUE(first->is_done());
  EXPECT_EQ(bytes_.to, bytes_.from);
  std::vector<void*> expected;
  for (const std::size_t begin : {0, 40, 50, 60, 70, 80, 90, 10, 20, 30}) {
    expected.push_back(&bytes_.to[begin]);
  }
  EXPECT_EQ(seen_, expected);
}

/// The device gets there when the test says so. Who waits for it is let through, as a host is that only tells a queue.
class HandEvent final : public Event {
 public:
  [[nodiscard]] bool is_done() const override { return done_; }
  void wait() const override {}
  void reach() { done_ = true; }

 private:
  std::atomic<bool> done_ = false;
};

TEST_F(MoverTest, AnUrgentTransferStandsInNobodysWayBeforeItIsReady) {
  const auto event = std::make_shared<HandEvent>();
  hold_and_note([&](const void* to) {
    if (to == &bytes_.to[20]) {
      event->reach();
    }
  });
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 10});
  const TransferPtr first = mover.push({bytes_.run(0, 20)}, {});
  const TransferPtr second = mover.push({bytes_.run(20, 30)}, {});
  begun_.get_future().wait();
  const TransferPtr urgent = mover.push_urgent({bytes_.run(50, 50)}, {event}, nullptr, "test", 0);
  go();
  second->wait_done();
  urgent->wait_done();
  EXPECT_EQ(bytes_.to, bytes_.from);
  std::vector<void*> expected;
  for (const std::size_t begin : {0, 10, 20, 50, 60, 70, 80, 90, 30, 40}) {
    expected.push_back(&bytes_.to[begin]);
  }
  EXPECT_EQ(seen_, expected);
}

TEST_F(MoverTest, OfTwoThatAreNotReadyTheEarlierGoesFirst) {
  const auto event = std::make_shared<HandEvent>();
  hold_and_note();
  Mover mover(device_, Queue::kUp, {});
  const TransferPtr first = mover.push({bytes_.run(0, 10)}, {});
  begun_.get_future().wait();
  const TransferPtr urgent = mover.push_urgent({bytes_.run(10, 10)}, {event}, nullptr, "test", 0);
  const TransferPtr other = mover.push({bytes_.run(20, 10)}, {event});
  const TransferPtr later = mover.push_urgent({bytes_.run(30, 10)}, {event}, nullptr, "test", 1);
  go();
  later->wait_done();
  EXPECT_EQ(seen_, (std::vector<void*>{&bytes_.to[0], &bytes_.to[10], &bytes_.to[20], &bytes_.to[30]}));
}

TEST_F(MoverTest, HoldingStopsNothingThatIsUrgent) {
  Mover mover(device_, Queue::kUp, {});
  mover.hold(std::chrono::hours(1));
  mover.push_urgent({bytes_.run(0, 100)}, {}, nullptr, "test", 0)->wait_done();
  EXPECT_EQ(bytes_.to, bytes_.from);
}

TEST_F(MoverTest, AnErrorReachesTheUrgentToo) {
  std::promise<void> begun;
  device_.before_copy = [&, is_first = true, gate = go_.get_future().share()](Queue, void*, std::size_t) mutable {
    if (std::exchange(is_first, false)) {
      begun.set_value();
      gate.wait();
      return;
    }
    throw std::runtime_error("the link is cut");
  };
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 10});
  const TransferPtr first = mover.push({bytes_.run(0, 30)}, {});
  begun.get_future().wait();
  const TransferPtr urgent = mover.push_urgent({bytes_.run(30, 10)}, {}, nullptr, "test", 0);
  const TransferPtr waiting = mover.push_urgent({bytes_.run(40, 10)}, {}, nullptr, "test", 1);
  go();
  for (const TransferPtr& transfer : {first, urgent, waiting}) {
    EXPECT_THROW(transfer->wait_done(), std::runtime_error);
  }
  EXPECT_THROW((void)mover.push_urgent({bytes_.run(0, 1)}, {}, nullptr, "test", 2), std::runtime_error);
}

TEST_F(MoverTest, ATransferOfNothingIsDoneInItsTurn) {
  hold();
  Mover mover(device_, Queue::kUp, {});
  const TransferPtr first = mover.push({bytes_.run(0, 100)}, {});
  const TransferPtr nothing = mover.push({}, {});
  EXPECT_FALSE(nothing->is_done());
  go();
  nothing->wait_done();
  EXPECT_TRUE(first->is_done());
}

TEST_F(MoverTest, IssuedIsToldWithAnEventBeforeDone) {
  hold();
  Mover mover(device_, Queue::kUp, {});
  const TransferPtr transfer = mover.push({bytes_.run(0, 100)}, {device_.record(Queue::kCompute)});
  auto event = std::async(std::launch::async, [&] { return transfer->wait_issued(); });
  EXPECT_FALSE(transfer->is_done());
  go();
  EXPECT_NE(event.get(), nullptr);
  transfer->wait_done();
  EXPECT_EQ(bytes_.to, bytes_.from);
}

TEST_F(MoverTest, TransfersMayWaitForEachOtherAcrossMovers) {
  Mover up(device_, Queue::kUp, {});
  Mover down(device_, Queue::kDown, {});
  TransferPtr last;
  for (int round = 0; round < 200; ++round) {
    const TransferPtr risen = up.push({bytes_.run(0, 50)}, {}, last);
    last = down.push({bytes_.run(50, 50)}, {}, risen);
  }
  last->wait_done();
  EXPECT_EQ(device_.num_up, 200);
  EXPECT_EQ(device_.num_down, 200);
}

TEST_F(MoverTest, AnErrorWakesEveryWaiterAndStaysWithTheMover) {
  device_.before_copy = [gate = go_.get_future().share()](Queue, void*, std::size_t) {
    gate.wait();
    throw std::runtime_error("the link broke");
  };
  Mover mover(device_, Queue::kUp, {});
  Mover other(device_, Queue::kDown, {});
  const TransferPtr first = mover.push({bytes_.run(0, 50)}, {});
  const TransferPtr second = mover.push({bytes_.run(50, 50)}, {});
  const TransferPtr elsewhere = other.push({}, {}, second);
  std::vector<std::future<void>> waiters;
  waiters.push_back(std::async(std::launch::async, [&] { first->wait_done(); }));
  waiters.push_back(std::async(std::launch::async, [&] { (void)first->wait_issued(); }));
  waiters.push_back(std::async(std::launch::async, [&] { second->wait_done(); }));
  waiters.push_back(std::async(std::launch::async, [&] { elsewhere->wait_done(); }));
  go();
  for (auto& waiter : waiters) {
    EXPECT_THROW(waiter.get(), std::runtime_error);
  }
  EXPECT_FALSE(first->is_done());
  EXPECT_THROW((void)mover.push({bytes_.run(0, 1)}, {}), std::runtime_error);
  EXPECT_THROW((void)other.push({bytes_.run(0, 1)}, {}), std::runtime_error);
}

TEST_F(MoverTest, ClosingFinishesWhatWasPushed) {
  Mover mover(device_, Queue::kUp, {.piece_nbytes = 10, .delay_seed = 3});
  std::vector<TransferPtr> transfers;
  for (std::size_t i = 0; i < 10; ++i) {
    transfers.push_back(mover.push({bytes_.run(10 * i, 10)}, {}));
  }
  mover.close();
  for (const TransferPtr& transfer : transfers) {
    EXPECT_TRUE(transfer->is_done());
  }
  EXPECT_EQ(bytes_.to, bytes_.from);
  EXPECT_THROW((void)mover.push({}, {}), InternalError);
  mover.close();
}

}  // namespace
}  // namespace pannier
