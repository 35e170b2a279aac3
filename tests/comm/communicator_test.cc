#include "pannier/comm/communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <numeric>

#include "pannier/base/error.h"
#include "tests/comm/run_ranks.h"

namespace pannier {
namespace {

using testing::run_ranks;

at::Tensor bytes(std::int64_t nbytes) { return at::empty({nbytes}, at::kByte); }

/// What rank `from` sends to rank `to`, in operation number `round`.
at::Tensor payload(int from, int to, int round, std::int64_t nbytes) {
  return at::arange(nbytes, at::kLong).mul(7).add(from * 31 + to * 5 + round).remainder(251).to(at::kByte);
}

/// Uneven, and empty for many pairs.
std::int64_t size_of(int from, int to, int round) { return (from * 13 + to * 29 + round * 7) % 5 * 37; }

struct Exchanged {
  ExchangeLayout layout;
  at::Tensor received;
  std::unique_ptr<PendingExchange> pending;
};

Exchanged start_uneven(Communicator& group, int round) {
  std::vector<std::int64_t> to;
  std::vector<std::int64_t> from;
  for (int other = 0; other < group.world_size(); ++other) {
    to.push_back(size_of(group.rank(), other, round));
    from.push_back(size_of(other, group.rank(), round));
  }
  const ExchangeLayout send_layout(group.rank(), to);
  const at::Tensor send = bytes(send_layout.total_nbytes());
  for (int other = 0; other < group.world_size(); ++other) {
    if (other != group.rank()) {
      payload_view(send, send_layout, other)
          .copy_(payload(group.rank(), other, round, to[static_cast<std::size_t>(other)]));
    }
  }
  Exchanged result{ExchangeLayout(group.rank(), from), {}, nullptr};
  result.received = bytes(result.layout.total_nbytes());
  result.pending = group.exchange(
      {OperationKind::kGradients, 1, round},
      {.send = message_views(send, send_layout), .receive = message_views(result.received, result.layout)});
  return result;
}

void expect_arrived(Communicator& group, const Exchanged& exchanged, int round) {
  for (int other = 0; other < group.world_size(); ++other) {
    if (other != group.rank()) {
      const at::Tensor expected = payload(other, group.rank(), round, size_of(other, group.rank(), round));
      EXPECT_TRUE(at::equal(payload_view(exchanged.received, exchanged.layout, other), expected))
          << "round " << round << ", from rank " << other << " to rank " << group.rank();
    }
  }
}

class EachWorld : public ::testing::TestWithParam<int> {};

TEST_P(EachWorld, ExchangesUnevenAndEmptyPieces) {
  run_ranks(GetParam(), [](Communicator& group) {
    for (int round = 0; round < 8; ++round) {
      const Exchanged exchanged = start_uneven(group, round);
      exchanged.pending->wait();
      exchanged.pending->wait();
      expect_arrived(group, exchanged, round);
    }
  });
}

TEST_P(EachWorld, KeepsManyExchangesUnderWay) {
  run_ranks(GetParam(), [](Communicator& group) {
    std::vector<Exchanged> all;
    for (int round = 0; round < 12; ++round) {
      all.push_back(start_uneven(group, round));
    }
    for (int round = 11; round >= 0; --round) {
      all[static_cast<std::size_t>(round)].pending->wait();
      expect_arrived(group, all[static_cast<std::size_t>(round)], round);
    }
  });
}

TEST_P(EachWorld, AnExchangeMayBeDropped) {
  run_ranks(GetParam(), [](Communicator& group) {
    start_uneven(group, 0);
    const Exchanged next = start_uneven(group, 1);
    next.pending->wait();
    expect_arrived(group, next, 1);
  });
}

TEST_P(EachWorld, GathersByOneMessageForAll) {
  run_ranks(GetParam(), [](Communicator& group) {
    const int world_size = group.world_size();
    std::vector<std::int64_t> sizes;
    for (int rank = 0; rank < world_size; ++rank) {
      sizes.push_back(100 + 20 * rank);
    }
    const at::Tensor mine = bytes(message_nbytes(sizes[static_cast<std::size_t>(group.rank())]));
    mine.fill_(group.rank() + 1);
    const ExchangeLayout layout(group.rank(), sizes);
    const at::Tensor all = bytes(layout.total_nbytes());
    group
        .exchange({OperationKind::kParameters, 1, 0},
                  {.send = std::vector<at::Tensor>(static_cast<std::size_t>(world_size), mine),
                   .receive = message_views(all, layout)})
        ->wait();
    for (int rank = 0; rank < world_size; ++rank) {
      if (rank != group.rank()) {
        EXPECT_TRUE(payload_view(all, layout, rank).eq(rank + 1).all().item<bool>());
      }
    }
  });
}

// As a bucket is gathered in place: pieces of odd sizes side by side, nothing between them.
TEST_P(EachWorld, GathersIntoOneRunWithStampsApart) {
  run_ranks(GetParam(), [](Communicator& group) {
    const int world_size = group.world_size();
    const at::Tensor whole = bytes(world_size * (world_size + 1) / 2 * 7).fill_(255);
    std::vector<at::Tensor> pieces;
    for (std::int64_t rank = 0, begin = 0; rank < world_size; begin += 7 * ++rank) {
      pieces.push_back(whole.narrow(0, begin, 7 * (rank + 1)));
    }
    const at::Tensor mine = pieces[static_cast<std::size_t>(group.rank())].fill_(group.rank());
    const WireBytes before = group.wire_bytes();
    group
        .exchange({OperationKind::kParameters, 1, 0},
                  {.send = std::vector<at::Tensor>(static_cast<std::size_t>(world_size), mine),
                   .receive = pieces,
                   .stamps = StampPlace::kApart})
        ->wait();
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_TRUE(pieces[static_cast<std::size_t>(rank)].eq(rank).all().item<bool>());
    }
    EXPECT_EQ(group.wire_bytes().total() - before.total(), (world_size - 1) * mine.numel());
  });
}

TEST_P(EachWorld, SumsIntegersThatWrap) {
  run_ranks(GetParam(), [](Communicator& group) {
    const std::int64_t world_size = group.world_size();
    std::vector<std::int64_t> values{group.rank() + 1, -group.rank(), std::int64_t{1} << 62};
    group.sum(values);
    EXPECT_EQ(values[0], world_size * (world_size + 1) / 2);
    EXPECT_EQ(values[1], -world_size * (world_size - 1) / 2);
    EXPECT_EQ(static_cast<std::uint64_t>(values[2]), static_cast<std::uint64_t>(world_size) << 62);
    std::vector<std::int64_t> none;
    group.sum(none);
  });
}

TEST_P(EachWorld, BroadcastsTensorsOfAnyTypeAndSize) {
  run_ranks(GetParam(), [](Communicator& group) {
    const int root = group.world_size() - 1;
    const auto check = [&](const at::Tensor& value) {
      at::Tensor mine = group.rank() == root ? value.clone() : at::zeros_like(value);
      group.broadcast(mine, root);
      EXPECT_TRUE(at::equal(mine, value));
    };
    check(at::arange(1000, at::kFloat).to(at::kBFloat16).reshape({10, 100}).t());
    check(at::scalar_tensor(3.5, at::kDouble));
    check(at::empty({0}));
    check(at::arange((5 << 20) + 3, at::kInt).to(at::kByte));
  });
}

TEST_P(EachWorld, CountsWireBytesExactly) {
  run_ranks(GetParam(), [](Communicator& group) {
    const int others = group.world_size() - 1;
    const ExchangeLayout layout(group.rank(), std::vector<std::int64_t>(static_cast<std::size_t>(others + 1), 4096));
    const at::Tensor send = bytes(layout.total_nbytes());
    const at::Tensor receive = bytes(layout.total_nbytes());
    for (const auto kind : {OperationKind::kGradients, OperationKind::kParameters, OperationKind::kParameters}) {
      group.exchange({kind, 1, 0}, {.send = message_views(send, layout), .receive = message_views(receive, layout)})
          ->wait();
    }
    std::vector<std::int64_t> values(10);
    group.sum(values);
    at::Tensor tensor = at::zeros({16}, at::kByte);
    group.broadcast(tensor, 0);
    const WireBytes wire = group.wire_bytes();
    EXPECT_EQ(wire.payload_of(OperationKind::kGradients), others * 4096);
    EXPECT_EQ(wire.payload_of(OperationKind::kParameters), others * 2 * 4096);
    EXPECT_EQ(wire.payload_of(OperationKind::kVotes), others * 80);
    EXPECT_EQ(wire.payload_of(OperationKind::kOther), group.rank() == 0 ? others * 16 : 0);
    EXPECT_EQ(wire.overhead_of(OperationKind::kParameters), others * 2 * kStampNbytes);
    EXPECT_EQ(wire.total(), others * (3 * 4112 + 96) + (group.rank() == 0 ? others * 32 : 0));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, EachWorld, ::testing::Values(1, 2, 3, 4));

TEST(Communicator, RefusesMessagesThatAreNone) {
  run_ranks(2, [](Communicator& group) {
    const auto exchange = [&](const at::Tensor& message) {
      std::ignore = group.exchange({}, {.send = {message, message}, .receive = {at::Tensor(), at::Tensor()}});
    };
    EXPECT_THROW(exchange(bytes(16)), InternalError);
    EXPECT_THROW(exchange(bytes(40)), InternalError);
    EXPECT_THROW(exchange(at::empty({32}, at::kFloat)), InternalError);
    EXPECT_THROW(exchange(bytes(64).slice(0, 8, 40)), InternalError);
    EXPECT_THROW(std::ignore = group.exchange({}, {.send = {}, .receive = {}}), InternalError);
  });
}

TEST(Communicator, AWorldOfOneNeedsNoGroup) {
  const auto solo = make_solo_communicator();
  std::vector<std::int64_t> values{3};
  solo->sum(values);
  solo->agree("anything", "x");
  solo->exchange({}, {.send = {at::Tensor()}, .receive = {at::Tensor()}})->wait();
  EXPECT_EQ(values[0], 3);
  EXPECT_EQ(solo->wire_bytes().total(), 0);
}

}  // namespace
}  // namespace pannier
