#include "pannier/io/io_engine.h"

#include <fmt/format.h>
#include <pthread.h>

#include <csignal>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/io/engines.h"

namespace pannier {
namespace {

constexpr int kMaxDepth = 1024;
constexpr std::size_t kMaxPieceBytes = std::size_t{1} << 30;

}  // namespace

namespace detail {

void block_signals() noexcept {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
  ::pthread_setname_np(::pthread_self(), "pannier-io");
}

}  // namespace detail

void IoEngineOptions::validate() const {
  if (piece_nbytes == 0 || piece_nbytes % kIoAlignment != 0 || piece_nbytes > kMaxPieceBytes) {
    throw ConfigError(fmt::format("piece_nbytes must be a positive multiple of {} up to {}, got {}", kIoAlignment,
                                  kMaxPieceBytes, piece_nbytes));
  }
  if (depth < 1 || depth > kMaxDepth) {
    throw ConfigError(fmt::format("depth must be 1 to {}, got {}", kMaxDepth, depth));
  }
}

IoEngine::IoEngine(const DiskFile& file, const IoEngineOptions& options) : queue_(file, options.piece_nbytes) {}

IoTransferPtr IoEngine::read(std::uint64_t offset, std::span<std::byte> to, OnTransferEnd on_end) {
  auto transfer = queue_.push(false, offset, to.data(), to.size(), std::move(on_end));
  wake();
  return transfer;
}

IoTransferPtr IoEngine::write(std::uint64_t offset, std::span<const std::byte> from, OnTransferEnd on_end) {
  // One kind of piece serves both ways; a write only reads from it.
  auto transfer = queue_.push(true, offset, const_cast<std::byte*>(from.data()), from.size(), std::move(on_end));
  wake();
  return transfer;
}

std::unique_ptr<IoEngine> make_io_engine(const DiskFile& file, const IoEngineOptions& options) {
  options.validate();
  if (options.kind == IoEngineKind::kThreads) {
    return detail::make_thread_engine(file, options);
  }
  std::string reason;
  try {
    return detail::make_uring_engine(file, options);
  } catch (const IoError& error) {
    if (options.kind == IoEngineKind::kUring) {
      throw;
    }
    reason = error.what();
  }
  auto engine = detail::make_thread_engine(file, options);
  engine->notes_.push_back(fmt::format("NVMe I/O uses threads, not io_uring: {}", reason));
  return engine;
}

}  // namespace pannier
