#include "pannier/tier/tide.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <optional>
#include <stdexcept>
#include <utility>

#include "tests/device/watched_device.h"

namespace pannier {
namespace {

constexpr std::int64_t kNumel = 64;
constexpr int kNumBuckets = 3;
constexpr std::size_t kNbytes = kNumel * 10;  // bf16: two states and `lo`.

class TideTest : public testing::Test {
 protected:
  void fill_host(int bucket, float value) {
    const Lease lease = host_.lease(bucket);
    std::fill_n(lease.view().state1, kNumel, value);
    std::fill_n(static_cast<std::int16_t*>(lease.view().rest), kNumel, static_cast<std::int16_t>(value));
  }
  void add_on_device(int bucket, float value) {
    const Lease lease = tide_.lease(bucket);
    EXPECT_EQ(lease.view().param, params_[static_cast<std::size_t>(bucket)].data_ptr());
    for (std::int64_t i = 0; i < kNumel; ++i) {
      lease.view().state1[i] += value;
      lease.view().state2[i] -= value;
      static_cast<std::int16_t*>(lease.view().rest)[i] += static_cast<std::int16_t>(value);
    }
  }
  void expect_host(int bucket, float state1, float state2) {
    const Lease lease = host_.lease(bucket);
    for (std::int64_t i = 0; i < kNumel; ++i) {
      ASSERT_EQ(lease.view().state1[i], state1);
      ASSERT_EQ(lease.view().state2[i], state2);
      ASSERT_EQ(static_cast<std::int16_t*>(lease.view().rest)[i], static_cast<std::int16_t>(state1));
    }
  }
  [[nodiscard]] std::size_t counted() const {
    return device_.memory().current_by_owner[static_cast<std::size_t>(Owner::kStreamedStates)];
  }

  StateShape shape_{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};
  std::vector<std::int64_t> numels_ = std::vector<std::int64_t>(kNumBuckets, kNumel);
  WatchedDevice device_;
  HostMemory memory_;
  HostStateStore host_{memory_, shape_, numels_};
  std::vector<at::Tensor> params_ = std::vector<at::Tensor>(kNumBuckets, at::zeros({kNumel}, at::kBFloat16));
  Mover up_{device_, Queue::kUp, {.piece_nbytes = 100}};
  Mover down_{device_, Queue::kDown, {.piece_nbytes = 100}};
  Tide tide_{{device_, host_, up_, down_, shape_, numels_,
              [this](int bucket) { return params_[static_cast<std::size_t>(bucket)]; }}};
};

TEST_F(TideTest, StatesAreEqualAfterARoundTrip) {
  fill_host(1, 5.0F);
  add_on_device(1, 2.0F);
  EXPECT_TRUE(tide_.is_up(1));
  EXPECT_EQ(tide_.live_nbytes(), kNbytes);
  expect_host(1, 7.0F, -2.0F);
  EXPECT_FALSE(tide_.is_up(1));
  expect_host(0, 0.0F, 0.0F);
  EXPECT_EQ(counted(), 0U);
}

TEST_F(TideTest, ParametersThatRestInHostMemoryTravelWithTheirStates) {
  const std::unique_ptr<ParameterShards> shards =
      make_host_shards(device_, memory_, up_, down_, shards_of_type(at::kFloat, numels_));
  const StateShape shape{.param_nbytes = 4, .rest_nbytes = 0, .num_states = 1};
  HostStateStore host(memory_, shape, numels_,
                      {shards->host_address(0), shards->host_address(1), shards->host_address(2)});
  {
    Tide tide({device_, host, up_, down_, shape, numels_,
               [](int) -> at::Tensor { throw std::logic_error("nothing is on the device"); },
               [&](int) { return shards.get(); }});
    EXPECT_EQ(tide.nbytes(1), kNumel * 8U);
    shards->store(1, at::arange(kNumel, at::kFloat));
    tide.raise(1);
    for (int step = 0; step < 3; ++step) {
      const Lease lease = tide.lease(1);
      for (std::int64_t i = 0; i < kNumel; ++i) {
        EXPECT_EQ(static_cast<float*>(lease.view().param)[i], static_cast<float>(i + step));
        static_cast<float*>(lease.view().param)[i] += 1.0F;
        lease.view().state1[i] += 2.0F;
      }
    }
    const at::Tensor whole = at::empty({kNumel});
    shards->raise(1, whole);
    shards->finish_raise(1);
    EXPECT_TRUE(at::equal(whole, at::arange(kNumel, at::kFloat) + 3));
    shards->settle(1);
    const Lease lease = host.lease(1);
    EXPECT_EQ(lease.view().state1[kNumel - 1], 6.0F);
    EXPECT_EQ(static_cast<float*>(lease.view().param)[1], 4.0F);
  }
}

TEST_F(TideTest, ABucketThatStaysIsNotCopiedAgain) {
  tide_.raise(0);
  for (int step = 0; step < 5; ++step) {
    tide_.raise(0);
    add_on_device(0, 1.0F);
  }
  tide_.settle();
  EXPECT_EQ(device_.num_up, 7);  // 640 bytes in pieces of 100.
  EXPECT_EQ(device_.num_down, 5 * 7);
  EXPECT_TRUE(tide_.is_up(0));
  expect_host(0, 5.0F, -5.0F);
}

TEST_F(TideTest, EditsThroughTheHostAfterARaiseAreSeen) {
  fill_host(2, 1.0F);
  tide_.raise(2);
  fill_host(2, 9.0F);
  add_on_device(2, 1.0F);
  fill_host(2, 20.0F);
  add_on_device(2, 1.0F);
  expect_host(2, 21.0F, -2.0F);
}

TEST_F(TideTest, ShrinkingKeepsWhatIsMeantForTheNextUpdateUnlessTold) {
  add_on_device(0, 1.0F);
  add_on_device(1, 1.0F);
  tide_.raise(1);
  tide_.raise(2);
  tide_.shrink_to(0, true, false);
  EXPECT_FALSE(tide_.is_up(0));
  EXPECT_TRUE(tide_.is_up(1));
  EXPECT_TRUE(tide_.is_up(2));
  tide_.shrink_to(kNbytes, true, true);
  EXPECT_FALSE(tide_.is_up(1));  // It would be updated last.
  EXPECT_TRUE(tide_.is_up(2));
  tide_.shrink_to(0, true, true);
  EXPECT_EQ(tide_.live_nbytes(), 0U);
  EXPECT_EQ(counted(), 0U);
  expect_host(1, 1.0F, -1.0F);
}

TEST_F(TideTest, ShrinkingWithoutWaitingLeavesWhatIsOnItsWay) {
  std::promise<void> go;
  tide_.raise(0);
  add_on_device(1, 1.0F);
  tide_.settle();
  device_.before_copy = [gate = go.get_future().share()](Queue queue, void*, std::size_t) {
    if (queue == Queue::kDown) {
      gate.wait();
    }
  };
  add_on_device(0, 1.0F);
  tide_.shrink_to(0, false, false);
  EXPECT_TRUE(tide_.is_up(0));
  EXPECT_FALSE(tide_.is_up(1));
  go.set_value();
  tide_.shrink_to(0, true, false);
  EXPECT_FALSE(tide_.is_up(0));
  expect_host(0, 1.0F, -1.0F);
}

TEST_F(TideTest, MakesRoomOnlyForWhatIsNotUp) {
  std::vector<int> asked;
  tide_.before_lease([&asked](int bucket) { asked.push_back(bucket); });
  add_on_device(0, 1.0F);
  add_on_device(0, 1.0F);
  add_on_device(2, 1.0F);
  EXPECT_EQ(asked, (std::vector<int>{0, 2}));
}

TEST_F(TideTest, EndsOnlyWhenItsCopiesHave) {
  std::promise<void> reached;
  std::promise<void> go_on;
  std::atomic<bool> copied = false;
  device_.before_copy = [&, first = true](Queue queue, void* /*to*/, std::size_t /*nbytes*/) mutable {
    if (queue == Queue::kDown && std::exchange(first, false)) {
      reached.set_value();
      go_on.get_future().wait();
      copied = true;
    }
  };
  std::optional<Tide> tide(std::in_place, TideParts{device_, host_, up_, down_, shape_, numels_, [this](int bucket) {
                                                      return params_[static_cast<std::size_t>(bucket)];
                                                    }});
  {
    const Lease lease = tide->lease(0);
  }
  reached.get_future().wait();
  auto end = std::async(std::launch::async, [&tide] { tide.reset(); });
  go_on.set_value();
  end.wait();
  EXPECT_TRUE(copied);
}

TEST_F(TideTest, MemoryThatIsNotThereChangesNothing) {
  fill_host(0, 3.0F);
  const std::size_t cap = device_.memory().current + kNbytes / 2;
  device_.add_memory_cap(cap);
  EXPECT_THROW(tide_.raise(0), c10::OutOfMemoryError);
  device_.remove_memory_cap(cap);
  EXPECT_EQ(tide_.live_nbytes(), 0U);
  add_on_device(0, 1.0F);
  expect_host(0, 4.0F, -1.0F);
}

TEST_F(TideTest, GivesBackAllThatNoLeaseHolds) {
  add_on_device(0, 1.0F);
  tide_.raise(1);
  {
    const Lease lease = tide_.lease(2);
    EXPECT_TRUE(tide_.give_back());
    EXPECT_EQ(tide_.live_nbytes(), kNbytes);
    EXPECT_TRUE(tide_.is_up(2));
    EXPECT_FALSE(tide_.give_back());
  }
  expect_host(0, 1.0F, -1.0F);
}

TEST_F(TideTest, ALostWayUpIsNeverReadAsState) {
  device_.before_copy = [](Queue queue, void*, std::size_t) {
    if (queue == Queue::kUp) {
      throw std::runtime_error("the link broke");
    }
  };
  tide_.raise(0);
  EXPECT_THROW((void)tide_.lease(0), std::runtime_error);
  EXPECT_THROW((void)tide_.lease(1), std::runtime_error);
  EXPECT_THROW((void)tide_.lease(1), std::runtime_error);
  EXPECT_FALSE(tide_.is_up(1));
}

TEST_F(TideTest, ALostWayDownIsSaidByWhateverComesNext) {
  device_.before_copy = [](Queue queue, void*, std::size_t) {
    if (queue == Queue::kDown) {
      throw std::runtime_error("the link broke");
    }
  };
  add_on_device(0, 1.0F);
  EXPECT_THROW(tide_.settle(), std::runtime_error);
  EXPECT_THROW((void)host_.lease(0), std::runtime_error);
  add_on_device(1, 1.0F);  // Its way down can't even be pushed.
  EXPECT_THROW((void)host_.lease(1), std::runtime_error);
  EXPECT_THROW((void)tide_.lease(1), std::runtime_error);
  EXPECT_THROW(tide_.shrink_to(0, true, true), std::runtime_error);
  EXPECT_FALSE(tide_.give_back());
}

}  // namespace
}  // namespace pannier
