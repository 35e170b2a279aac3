#include "pannier/comm/exchange_layout.h"

#include <gtest/gtest.h>

#include "pannier/base/error.h"

namespace pannier {
namespace {

TEST(ExchangeLayout, LeavesRoomForPaddingAndAStampInEachMessage) {
  const ExchangeLayout layout(1, {32, 7, 33, 1});
  EXPECT_EQ(layout.message_nbytes(0), 48);
  EXPECT_EQ(layout.message_nbytes(2), 64);
  EXPECT_EQ(layout.message_nbytes(3), 32);
  EXPECT_EQ(layout.offset(0), 0);
  EXPECT_EQ(layout.offset(2), 48);
  EXPECT_EQ(layout.offset(3), 112);
  EXPECT_EQ(layout.total_nbytes(), 144);
  EXPECT_EQ(layout.overhead_nbytes(), 144 - 66);
}

TEST(ExchangeLayout, HasNoMessageForTheOwnPiece) {
  const ExchangeLayout left_out(1, {16, 100, 16});
  EXPECT_EQ(left_out.payload_nbytes(1), 0);
  EXPECT_EQ(left_out.total_nbytes(), 64);
  const ExchangeLayout kept(1, {16, 100, 16}, OwnPiece::kKept);
  EXPECT_EQ(kept.payload_nbytes(1), 100);
  EXPECT_EQ(kept.message_nbytes(1), 0);
  EXPECT_EQ(kept.offset(2), 32 + 112);
  EXPECT_EQ(kept.total_nbytes(), 32 + 112 + 32);
  EXPECT_EQ(kept.overhead_nbytes(), 32);
}

TEST(ExchangeLayout, EmptyPiecesTakeNothing) {
  const ExchangeLayout layout(0, {0, 0, 48, 0});
  EXPECT_EQ(layout.message_nbytes(1), 0);
  EXPECT_EQ(layout.message_nbytes(3), 0);
  EXPECT_EQ(layout.offset(2), 0);
  EXPECT_EQ(layout.total_nbytes(), 64);
  EXPECT_EQ(ExchangeLayout(0, {5}).total_nbytes(), 0);
}

TEST(ExchangeLayout, RefusesWhatCannotBe) {
  EXPECT_THROW(ExchangeLayout(0, {0, -1}), InternalError);
  EXPECT_THROW(ExchangeLayout(2, {1, 1}), InternalError);
}

TEST(ExchangeLayout, MessagesNeverOverlapAndAreAligned) {
  for (std::int64_t seed = 1; seed < 500; ++seed) {
    std::vector<std::int64_t> sizes;
    for (std::int64_t i = 0; i < 1 + seed % 7; ++i) {
      sizes.push_back((seed * 7919 + i * 104729) % 97 * (i % 3));
    }
    const int world_size = static_cast<int>(sizes.size());
    const ExchangeLayout layout(static_cast<int>(seed) % world_size, sizes, OwnPiece::kKept);
    std::int64_t end = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(layout.offset(rank) % kMessageAlignment, 0);
      EXPECT_GE(layout.offset(rank), end);
      end = layout.offset(rank) + std::max(layout.message_nbytes(rank), layout.payload_nbytes(rank));
    }
    EXPECT_LE(end, layout.total_nbytes());
  }
}

}  // namespace
}  // namespace pannier
