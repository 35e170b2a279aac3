// Collectives behind one small interface, so that one rank and many ranks run the same engine. There is one bulk
// operation, the exchange of bytes with every other rank: a reduce-scatter is an exchange and a sum in rank order by
// the caller, so that bucket sizes never change a bit; an all-gather is an exchange in which one piece goes to all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pannier/comm/exchange_layout.h"
#include "pannier/comm/label.h"
#include "pannier/comm/wire_bytes.h"

namespace pannier {

/// Where the stamp of a message is.
enum class StampPlace {
  kTail,   ///< In the message itself, which has message_nbytes(payload) bytes: payload, padding and stamp.
  kApart,  ///< Beside it: the message is the payload alone, so that pieces may lie side by side. Costs nothing in host
           ///< memory, and a second small operation on a device.
};

/// The messages of one exchange, one for each rank in either direction. A message is a contiguous kByte tensor of one
/// dimension; with a stamp in its tail its storage offset is a multiple of 16. No message: an undefined or empty
/// tensor. Several ranks may be sent the same tensor, as an all-gather does. A rank's own piece never travels: its
/// entries are ignored, and whoever needs the piece elsewhere copies it.
struct ExchangeBuffers {
  std::vector<at::Tensor> send{};         ///< By destination.
  std::vector<at::Tensor> receive{};      ///< By source.
  at::Device device = at::kCPU;           ///< Where they lie, and would lie if there are none; one kind on all ranks.
  StampPlace stamps = StampPlace::kTail;  ///< The same on all ranks.
};

/// The messages of a flat buffer with this layout, as ExchangeBuffers takes them.
[[nodiscard]] std::vector<at::Tensor> message_views(const at::Tensor& flat, const ExchangeLayout& layout);
/// The payload that belongs to `rank` in such a buffer; its own too, if the layout keeps it.
[[nodiscard]] at::Tensor payload_view(const at::Tensor& flat, const ExchangeLayout& layout, int rank);

/// An exchange under way, used by the communicator's thread, and not after the communicator. The messages must not be
/// touched before wait() has returned. Dropping it unwaited is allowed: then they stay alive by themselves until they
/// have travelled.
class PendingExchange {
 public:
  PendingExchange() = default;
  virtual ~PendingExchange() = default;
  PendingExchange(const PendingExchange&) = delete;
  PendingExchange& operator=(const PendingExchange&) = delete;

  /// Host memory: blocks until everything has arrived and been sent, and checks every stamp. Device memory: makes the
  /// current stream wait, never the host. Throws CollectiveError when a rank is missing at the deadline, died, reported
  /// a failure or runs something else; the group is dead then.
  virtual void wait() = 0;
  /// Device memory only, after wait(): a bool tensor of one element, true where a stamp is not what it should be, to be
  /// read with the step's other results before anything is updated. Undefined where nothing came, and in host memory,
  /// where wait() throws.
  [[nodiscard]] virtual at::Tensor mismatch() const { return {}; }
};

/// What ranks tell each other through a thread of their own, beside the one that uses the communicator. One thread.
class TextChannel {
 public:
  TextChannel() = default;
  virtual ~TextChannel() = default;
  TextChannel(const TextChannel&) = delete;
  TextChannel& operator=(const TextChannel&) = delete;
  /// As Communicator::share_texts().
  [[nodiscard]] virtual std::vector<std::string> share_texts(const std::string& name, const std::string& text) = 0;
};

/// A group of ranks. Every rank calls the same operations in the same order, from one thread at a time. Threads of its
/// own end in close(). In a forked child every operation is an InternalError, and the destructor does nothing.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int world_size() const noexcept = 0;

  /// Begins to send and to receive; see ExchangeBuffers. Does not wait for another rank.
  [[nodiscard]] virtual std::unique_ptr<PendingExchange> exchange(const Label& label, ExchangeBuffers buffers) = 0;
  /// Replaces each value by its sum over ranks: the one integer sum of a step, with the norm's limbs and the non-finite
  /// count. Blocks.
  virtual void sum(std::span<std::int64_t> values) = 0;
  /// Gives every rank the values that `tensor`, dense and of one size everywhere, has on rank `root`. Blocks.
  virtual void broadcast(const at::Tensor& tensor, int root) = 0;
  /// Compares a text over ranks, before the first tensor travels. Throws ConfigError on every rank that names the first
  /// rank whose text is not rank 0's and shows the first difference. Blocks.
  virtual void agree(const std::string& name, const std::string& value) = 0;
  /// Every rank's text, by rank, beside the collectives. Throws CollectiveError, after a deadline at the latest, unless
  /// all ranks share something of this `name`. Blocks.
  [[nodiscard]] virtual std::vector<std::string> share_texts(const std::string& name, const std::string& text) = 0;

  /// A channel that no other of this group has the name of. Ranks meet in those of one name. The communicator, which
  /// must not be closed before, outlives it.
  [[nodiscard]] virtual std::unique_ptr<TextChannel> open_channel(const std::string& name) = 0;

  /// Tells the others that this rank cannot go on; from then on every operation and wait on every rank throws a
  /// CollectiveError that names this rank and its message. Returns when the others can see it.
  virtual void report_failure(const std::string& message) = 0;
  /// Throws CollectiveError if the group is dead. To be called after the host waited for device work that may depend on
  /// an exchange: a dead group's exchanges end without their data.
  virtual void check() = 0;
  /// From now on the messages of CollectiveErrors end with what `explain` makes of them: what a bucket holds, say. Any
  /// thread may call it.
  virtual void explain_failures(std::function<std::string(const std::string& message)> explain) = 0;
  /// Bytes that this rank has sent.
  [[nodiscard]] virtual WireBytes wire_bytes() const = 0;
  /// Leaves the group and ends its threads. No operation may follow.
  virtual void close() = 0;
};

/// A world of one: every sum is its own value, and nothing travels.
[[nodiscard]] std::unique_ptr<Communicator> make_solo_communicator();

}  // namespace pannier
