#include "pannier/comm/exchange_layout.h"

#include <fmt/format.h>

#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

std::int64_t padded(std::int64_t nbytes) {
  return (nbytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
}

}  // namespace

std::int64_t message_nbytes(std::int64_t payload_nbytes) {
  return payload_nbytes == 0 ? 0 : padded(payload_nbytes) + kStampNbytes;
}

ExchangeLayout::ExchangeLayout(int own_rank, std::vector<std::int64_t> payload_nbytes, OwnPiece own)
    : own_rank_(own_rank), payloads_(std::move(payload_nbytes)) {
  PANNIER_CHECK(own_rank >= 0 && own_rank < world_size(),
                fmt::format("rank {} is not one of {}", own_rank, payloads_.size()));
  if (own == OwnPiece::kLeftOut) {
    payloads_[static_cast<std::size_t>(own_rank)] = 0;
  }
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::int64_t payload = payloads_[static_cast<std::size_t>(rank)];
    PANNIER_CHECK(payload >= 0, fmt::format("the piece of rank {} has {} bytes", rank, payload));
    offsets_.push_back(total_nbytes_);
    total_nbytes_ += rank == own_rank ? padded(payload) : pannier::message_nbytes(payload);
  }
}

std::int64_t ExchangeLayout::payload_nbytes(int rank) const { return payloads_.at(static_cast<std::size_t>(rank)); }

std::int64_t ExchangeLayout::message_nbytes(int rank) const {
  return rank == own_rank_ ? 0 : pannier::message_nbytes(payload_nbytes(rank));
}

std::int64_t ExchangeLayout::offset(int rank) const { return offsets_.at(static_cast<std::size_t>(rank)); }

std::int64_t ExchangeLayout::overhead_nbytes() const {
  std::int64_t overhead = 0;
  for (int rank = 0; rank < world_size(); ++rank) {
    overhead += rank == own_rank_ ? 0 : message_nbytes(rank) - payload_nbytes(rank);
  }
  return overhead;
}

}  // namespace pannier
