#include "pannier/device/step_trace.h"

#include <gmock/gmock.h>

#include <thread>
#include <vector>

#include "pannier/device/device.h"
#include "pannier/device/mover.h"

namespace pannier {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StrEq;

class StepTraceTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = make_metered_cpu();
  StepTrace& trace_ = device_->trace();
};

auto what(const char* name) { return Field(&TraceSpan::label, Field(&TraceLabel::what, StrEq(name))); }

TEST_F(StepTraceTest, KeepsWhatBeganAndEndedInTheStep) {
  auto before = trace_.queued(Queue::kUp, {.what = "before"});
  trace_.start();
  EXPECT_TRUE(trace_.is_on());
  before.end();
  {
    const auto inside = trace_.host(TraceRow::kHostUpdates, {.what = "inside", .index = 3});
  }
  auto after = trace_.host(TraceRow::kCaller, {.what = "after"});
  const auto spans = trace_.take();
  after.end();
  EXPECT_FALSE(trace_.is_on());
  ASSERT_THAT(spans, ElementsAre(what("inside")));
  EXPECT_EQ(spans[0].row, TraceRow::kHostUpdates);
  EXPECT_EQ(spans[0].label.index, 3);
  EXPECT_GE(spans[0].begin_s, 0);
  EXPECT_GE(spans[0].end_s, spans[0].begin_s);
}

TEST_F(StepTraceTest, CutsWhatTheHostHadBegunBefore) {
  auto before = trace_.host(TraceRow::kHostUpdates, {.what = "before"});
  trace_.start();
  before.end();
  const auto spans = trace_.take();
  ASSERT_THAT(spans, ElementsAre(what("before")));
  EXPECT_EQ(spans[0].begin_s, 0);
}

TEST_F(StepTraceTest, DoesNotMixTwoSteps) {
  trace_.start();
  auto first = trace_.queued(Queue::kUp, {.what = "first"});
  (void)trace_.take();
  trace_.start();
  first.end();
  EXPECT_THAT(trace_.take(), IsEmpty());
}

TEST_F(StepTraceTest, PutsQueuesInTheirRowsInOrderOfBeginning) {
  trace_.start();
  for (const Queue queue : {Queue::kDown, Queue::kCompute, Queue::kUp}) {
    const auto span = trace_.queued(queue, {.what = "work", .nbytes = 8});
  }
  const auto spans = trace_.take();
  ASSERT_THAT(spans, SizeIs(3));
  EXPECT_EQ(spans[0].row, TraceRow::kDown);
  EXPECT_EQ(spans[1].row, TraceRow::kCompute);
  EXPECT_EQ(spans[2].row, TraceRow::kUp);
  EXPECT_LE(spans[0].begin_s, spans[2].begin_s);
}

TEST_F(StepTraceTest, MovesAScopeWithoutEndingIt) {
  trace_.start();
  StepTrace::Scope kept;
  {
    auto made = trace_.host(TraceRow::kCaller, {.what = "moved"});
    kept = std::move(made);
  }
  EXPECT_THAT(trace_.take(), IsEmpty());  // It has not ended.
  kept.end();
}

TEST_F(StepTraceTest, SeesAMoversTransfersWithTheirBytes) {
  std::vector<char> from(100, 'x');
  std::vector<char> to(100);
  trace_.start();
  {
    Mover mover(*device_, Queue::kUp, {});
    mover.push({{to.data(), from.data(), 60}, {to.data() + 60, from.data() + 60, 40}}, {}, nullptr, "states", 7)
        ->wait_done();
  }
  const auto spans = trace_.take();
  ASSERT_THAT(spans, ElementsAre(what("states")));
  EXPECT_EQ(spans[0].row, TraceRow::kUp);
  EXPECT_EQ(spans[0].label.index, 7);
  EXPECT_EQ(spans[0].label.nbytes, 100U);
}

TEST_F(StepTraceTest, TakesSpansOfManyThreads) {
  trace_.start();
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([this] {
        for (int k = 0; k < 100; ++k) {
          const auto host = trace_.host(TraceRow::kHostUpdates, {.what = "host"});
          const auto queued = trace_.queued(Queue::kUp, {.what = "queued"});
        }
      });
    }
  }
  EXPECT_THAT(trace_.take(), SizeIs(800));
}

TEST(TraceRow, HasAName) {
  EXPECT_STREQ(to_string(TraceRow::kCaller), "caller");
  EXPECT_STREQ(to_string(TraceRow::kDown), "to the host");
}

}  // namespace
}  // namespace pannier
