#include <fmt/format.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/io/engines.h"
#include "pannier/io/process_files.h"
#include "pannier/io/uring.h"

namespace pannier {
namespace {

constexpr std::uint64_t kWakeTag = 0;

/// One thread owns the ring: it takes pieces from the queue while fewer than `depth` are under way, hands them over in
/// one call, and sleeps in that call until a result or a wake-up comes (a write to an event descriptor that the ring
/// polls).
class UringEngine final : public IoEngine {
 public:
  UringEngine(const DiskFile& file, const IoEngineOptions& options)
      : IoEngine(file, options),
        hook_(options.hook),
        process_(::getpid()),
        depth_(static_cast<std::size_t>(options.depth)),
        ring_(static_cast<unsigned>(options.depth) + 1),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        slots_(depth_) {
    if (!wake_.is_open()) {
      throw IoError("create an event descriptor", errno);
    }
    for (std::size_t i = 0; i < depth_; ++i) {
      free_slots_.push_back(depth_ - 1 - i);
    }
    register_files();
    register_buffers(options.buffers);
    std::promise<int> started;
    auto start_error = started.get_future();
    thread_ = std::thread([this, &started] { work(started); });
    if (const int error = start_error.get(); error != 0) {
      thread_.join();
      throw IoError("try a block through io_uring", error);
    }
  }
  ~UringEngine() override { close(); }

  void close() noexcept override {
    if (!thread_.joinable()) {
      return;
    }
    if (process_ != ::getpid()) {
      thread_.detach();  // It is the parent's.
      return;
    }
    queue_.close();
    wake();
    thread_.join();
  }
  [[nodiscard]] const char* name() const noexcept override { return "io_uring"; }

 private:
  struct Slot {
    IoPiece piece;
    IoAttempt attempt;
  };

  void wake() noexcept override {
    const std::uint64_t one = 1;
    // Only a full counter refuses, and then a wake-up is on its way already.
    [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  }

  void register_files() {
    std::vector<int> fds;
    for (std::size_t i = 0; i < file().num_files(); ++i) {
      fds.push_back(file().fd(i));
    }
    has_files_ = ring_.register_files(fds) == 0;
  }

  void register_buffers(const std::vector<std::span<std::byte>>& buffers) {
    std::vector<iovec> vectors;
    std::size_t total = 0;
    for (const auto buffer : buffers) {
      vectors.push_back({buffer.data(), buffer.size()});
      total += buffer.size();
    }
    if (vectors.empty()) {
      return;
    }
    if (const int error = ring_.register_buffers(vectors); error != 0) {
      notes_.push_back(
          fmt::format("io_uring works with plain buffers: {} of staging memory could not be registered ({}; ulimit -l "
                      "limits it)",
                      format_bytes(total), std::strerror(error)));
      return;
    }
    buffers_ = std::move(vectors);
  }

  // The index of the registered buffer that holds all of the attempt's memory.
  std::optional<std::uint16_t> buffer_of(const IoAttempt& attempt) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto* const begin = static_cast<const std::byte*>(buffers_[i].iov_base);
      if (attempt.data >= begin && attempt.data + attempt.nbytes <= begin + buffers_[i].iov_len) {
        return static_cast<std::uint16_t>(i);
      }
    }
    return std::nullopt;
  }

  void poll_wake() {
    io_uring_sqe& request = ring_.next_request();
    request.opcode = IORING_OP_POLL_ADD;
    request.fd = wake_.get();
    request.poll32_events = POLLIN;
    request.user_data = kWakeTag;
  }

  void begin(IoPiece piece) {
    IoAttempt attempt{piece.is_write, piece.place.file, piece.place.offset, piece.data, piece.place.nbytes};
    if (hook_ != nullptr) {
      if (const auto answer = hook_->before(attempt)) {
        queue_.finish(std::move(piece), hook_->after(attempt, *answer));
        return;
      }
    }
    const std::size_t slot = free_slots_.back();
    free_slots_.pop_back();
    io_uring_sqe& request = ring_.next_request();
    fill(request, attempt);
    request.user_data = slot + 1;
    slots_[slot] = {std::move(piece), attempt};
  }

  void fill(io_uring_sqe& request, const IoAttempt& attempt) const {
    const auto buffer = buffer_of(attempt);
    if (buffer) {
      request.opcode = attempt.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
      request.buf_index = *buffer;
    } else {
      request.opcode = attempt.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    }
    request.flags = has_files_ ? static_cast<std::uint8_t>(IOSQE_FIXED_FILE) : std::uint8_t{0};
    request.fd = has_files_ ? static_cast<int>(attempt.file) : file().fd(attempt.file);
    request.off = attempt.offset;
    request.addr = reinterpret_cast<std::uint64_t>(attempt.data);
    request.len = static_cast<std::uint32_t>(attempt.nbytes);
  }

  void end(std::uint64_t tag, int result) {
    const std::size_t slot = tag - 1;
    Slot done = std::move(slots_[slot]);
    free_slots_.push_back(slot);
    if (hook_ != nullptr) {
      result = hook_->after(done.attempt, result);
    }
    queue_.finish(std::move(done.piece), result);
  }

  void take_results() {
    while (const auto result = ring_.next_result()) {
      if (result->tag == kWakeTag) {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto read = ::read(wake_.get(), &count, sizeof(count));
        poll_wake();
      } else {
        end(result->tag, result->result);
      }
    }
  }

  // The kernel took some requests, or none, for a reason other than being busy: those it did not take have failed.
  void fail_unsent(int error) {
    bool polls = true;
    while (const auto tag = ring_.take_back()) {
      if (*tag == kWakeTag) {
        polls = false;
      } else {
        end(*tag, -error);
      }
    }
    if (!polls) {
      poll_wake();
    }
  }

  // One request on its own, waited for. Bytes moved, or a negative errno value.
  int move_alone(const IoAttempt& attempt) {
    fill(ring_.next_request(), attempt);
    while (true) {
      const int refused = ring_.submit_and_wait(1);
      if (const auto result = ring_.next_result()) {
        return result->result;
      }
      if (refused != 0 && refused != EINTR && refused != EAGAIN) {
        ring_.take_back();
        return -refused;
      }
    }
  }

  // A kernel may offer io_uring and yet refuse its reads, its writes or its registered buffers; so a block of each file
  // goes there and back the way that all bytes will. 0, or an errno value.
  int try_blocks() {
    struct alignas(kIoAlignment) Block {
      std::array<std::byte, kIoAlignment> bytes;
    };
    Block own{};
    auto* const block = buffers_.empty() || buffers_.front().iov_len < kIoAlignment
                            ? own.bytes.data()
                            : static_cast<std::byte*>(buffers_.front().iov_base);
    const std::vector<std::byte> kept(block, block + kIoAlignment);
    int error = 0;
    for (std::size_t i = 0; i < file().num_files() && error == 0; ++i) {
      std::fill_n(block, kIoAlignment, static_cast<std::byte>(0xA5U ^ i));
      const std::vector<std::byte> written(block, block + kIoAlignment);
      const int out = move_alone({true, i, file().trial_offset(i), block, kIoAlignment});
      std::fill_n(block, kIoAlignment, std::byte{0});
      const int in = out < 0 ? out : move_alone({false, i, file().trial_offset(i), block, kIoAlignment});
      const bool is_same = std::equal(written.begin(), written.end(), block);
      error = in < 0 ? -in : (is_same ? 0 : EIO);
    }
    std::copy(kept.begin(), kept.end(), block);
    return error;
  }

  void work(std::promise<int>& started) {
    detail::block_signals();
    int error = ring_.start();
    if (error == 0) {
      error = try_blocks();
    }
    started.set_value(error);
    if (error != 0) {
      return;
    }
    poll_wake();
    while (true) {
      while (!free_slots_.empty()) {
        auto piece = queue_.try_pop();
        if (!piece) {
          break;
        }
        begin(std::move(*piece));
      }
      if (free_slots_.size() == depth_ && queue_.is_exhausted()) {
        break;
      }
      const int refused = ring_.submit_and_wait(1);
      take_results();
      if (refused != 0 && refused != EINTR && refused != EAGAIN && refused != EBUSY) {
        fail_unsent(refused);
      }
    }
    ring_.unregister_buffers();
  }

  PieceHook* hook_;
  pid_t process_;
  std::size_t depth_;
  Uring ring_;  ///< From here on the thread's alone, but for wake_.
  OwnedFd wake_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_slots_;
  bool has_files_ = false;
  std::vector<iovec> buffers_;
  std::thread thread_;
};

}  // namespace

namespace detail {

std::unique_ptr<IoEngine> make_uring_engine(const DiskFile& file, const IoEngineOptions& options) {
  return std::make_unique<UringEngine>(file, options);
}

}  // namespace detail

}  // namespace pannier
