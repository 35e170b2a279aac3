#include "pannier/io/piece_queue.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// Tries in a row that may move nothing before a piece is given up.
constexpr int kMaxStalls = 64;

std::string describe(const IoPiece& piece, const DiskFile& file) {
  return fmt::format("{} {} bytes at offset {} of '{}'", piece.is_write ? "write" : "read", piece.place.nbytes,
                     piece.place.offset, file.name(piece.place.file));
}

IoError short_result(const IoPiece& piece, const DiskFile& file, std::size_t moved) {
  struct stat facts{};
  const auto size = ::fstat(file.fd(piece.place.file), &facts) == 0 ? facts.st_size : -1;
  return {fmt::format("{}: only {} bytes were moved; the file has {}", describe(piece, file), moved, size), EIO};
}

}  // namespace

PieceQueue::PieceQueue(const DiskFile& file, std::size_t piece_nbytes) : file_(file), piece_nbytes_(piece_nbytes) {}

IoTransferPtr PieceQueue::push(bool is_write, std::uint64_t offset, std::byte* data, std::size_t nbytes,
                               OnTransferEnd on_end) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  PANNIER_CHECK(offset % kIoAlignment == 0 && nbytes % kIoAlignment == 0 && address % kIoAlignment == 0,
                fmt::format("a transfer of {} bytes at offset {} from address {:#x} is not aligned to {}", nbytes,
                            offset, address, kIoAlignment));
  PANNIER_CHECK(
      offset <= file_.nbytes() && nbytes <= file_.nbytes() - offset,
      fmt::format("a transfer of {} bytes at offset {} reaches beyond a file of {}", nbytes, offset, file_.nbytes()));
  auto transfer = std::make_shared<IoTransfer>(nbytes, std::move(on_end));
  {
    const std::lock_guard lock(queue_mutex_);
    PANNIER_CHECK(!is_closed_, "a transfer was pushed to an I/O engine that is closed");
    ++(is_write ? stats_.writes : stats_.reads);
    if (nbytes == 0) {
      return transfer;
    }
    (is_write ? writes_ : reads_).push_back({offset, data, nbytes, transfer});
  }
  queue_changed_->notify_all();
  return transfer;
}

std::optional<IoPiece> PieceQueue::cut_locked(bool is_write, std::vector<Remainder>& given_up) {
  auto& remainders = is_write ? writes_ : reads_;
  while (!remainders.empty()) {
    Remainder& next = remainders.front();
    if (next.transfer->has_failed()) {
      given_up.push_back(std::move(next));
      remainders.pop_front();
      continue;
    }
    IoPiece piece;
    piece.is_write = is_write;
    piece.place = file_.place(next.offset, std::min(next.nbytes, piece_nbytes_));
    piece.data = next.data;
    piece.transfer = next.transfer;
    next.offset += piece.place.nbytes;
    next.data += piece.place.nbytes;
    next.nbytes -= piece.place.nbytes;
    if (next.nbytes == 0) {
      remainders.pop_front();
    }
    write_is_next_ = !is_write;
    return piece;
  }
  return std::nullopt;
}

std::optional<IoPiece> PieceQueue::pop_locked(std::vector<Remainder>& given_up) {
  std::optional<IoPiece> piece;
  if (!again_.empty()) {
    piece = std::move(again_.front());
    again_.pop_front();
  } else {
    const bool first = write_is_next_;
    piece = cut_locked(first, given_up);
    if (!piece) {
      piece = cut_locked(!first, given_up);
    }
  }
  if (piece) {
    ++stats_.pieces;
    stats_.max_in_flight = std::max(stats_.max_in_flight, ++in_flight_);
  }
  return piece;
}

void PieceQueue::give_up(std::vector<Remainder>& remainders) noexcept {
  for (auto& remainder : remainders) {
    remainder.transfer->advance(remainder.nbytes);
  }
  remainders.clear();
}

std::optional<IoPiece> PieceQueue::try_pop() {
  std::vector<Remainder> given_up;
  std::optional<IoPiece> piece;
  {
    const std::lock_guard lock(queue_mutex_);
    piece = pop_locked(given_up);
  }
  give_up(given_up);
  return piece;
}

std::optional<IoPiece> PieceQueue::wait_pop() {
  while (true) {
    std::vector<Remainder> given_up;
    std::optional<IoPiece> piece;
    bool is_over = false;
    {
      std::unique_lock lock(queue_mutex_);
      queue_changed_->wait(lock,
                           [this] { return is_closed_ || !again_.empty() || !reads_.empty() || !writes_.empty(); });
      piece = pop_locked(given_up);
      is_over = !piece && is_closed_;
    }
    give_up(given_up);
    if (piece || is_over) {
      return piece;
    }
  }
}

void PieceQueue::end_attempt(bool is_short, bool is_error, const IoPiece* again) noexcept {
  {
    const std::lock_guard lock(queue_mutex_);
    --in_flight_;
    stats_.short_results += is_short ? 1 : 0;
    stats_.errors += is_error ? 1 : 0;
    if (again != nullptr) {
      again_.push_back(*again);
    }
  }
  if (again != nullptr) {
    queue_changed_->notify_one();
  }
}

void PieceQueue::finish(IoPiece piece, int result) noexcept {
  const std::size_t wanted = piece.place.nbytes;
  const std::size_t moved = result > 0 ? std::min(static_cast<std::size_t>(result), wanted) : 0;
  const bool may_retry = result >= 0 || result == -EAGAIN || result == -EINTR;
  // What follows goes on from an aligned place, so the odd end of a short result is moved again.
  const std::size_t kept = moved == wanted ? wanted : moved / kIoAlignment * kIoAlignment;
  {
    const std::lock_guard lock(queue_mutex_);
    (piece.is_write ? stats_.written_bytes : stats_.read_bytes) += kept;
  }
  const auto transfer = piece.transfer;
  if (kept == wanted) {
    end_attempt(false, false, nullptr);
    transfer->advance(kept);
    return;
  }
  piece.stalls = kept > 0 ? 0 : piece.stalls + 1;
  if (!may_retry || piece.stalls > kMaxStalls || (result == 0 && !piece.is_write)) {
    transfer->fail(std::make_exception_ptr(result < 0 ? IoError(describe(piece, file_), -result)
                                                      : short_result(piece, file_, moved)));
    end_attempt(result >= 0, true, nullptr);
    transfer->advance(wanted);
    return;
  }
  piece.place.offset += kept;
  piece.place.nbytes -= kept;
  piece.data += kept;
  end_attempt(result >= 0, false, &piece);
  if (kept > 0) {
    transfer->advance(kept);
  }
}

void PieceQueue::close() noexcept {
  {
    const std::lock_guard lock(queue_mutex_);
    is_closed_ = true;
  }
  queue_changed_->notify_all();
}

bool PieceQueue::is_exhausted() const {
  const std::lock_guard lock(queue_mutex_);
  return is_closed_ && again_.empty() && reads_.empty() && writes_.empty();
}

IoStats PieceQueue::stats() const {
  const std::lock_guard lock(queue_mutex_);
  return stats_;
}

}  // namespace pannier
