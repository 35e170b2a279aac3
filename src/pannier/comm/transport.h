// How the messages of an exchange travel: between threads, over Gloo or over NCCL. What is the same for all of them
// (stamps, counts, deadlines, errors) is in GroupCommunicator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "pannier/comm/communicator.h"

namespace pannier {

/// One exchange as a transport gets it: complete, stamped, checked.
struct Operation {
  std::uint32_t sequence = 0;
  Label label;
  ExchangeBuffers buffers;
};

/// One operation under way.
class Transfer {
 public:
  Transfer() = default;
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Whether finish() would not block. Called under the group state's lock, by whoever waits there.
  [[nodiscard]] virtual bool ready() const = 0;
  /// Makes the messages usable: in host memory now, in device memory on the current stream. Returns what another rank
  /// sent that was not meant, empty if all is well.
  [[nodiscard]] virtual std::string finish() = 0;
};

/// Moves messages for one rank. Called by one thread at a time, but abort() by any.
class Transport {
 public:
  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Begins the operation; never blocks for another rank. The transfer keeps the buffers alive until they have
  /// travelled, and until the process ends where that cannot be known.
  [[nodiscard]] virtual std::shared_ptr<Transfer> start(Operation operation) = 0;
  /// Bytes that it sends to each other rank beside the messages themselves.
  [[nodiscard]] virtual std::int64_t header_nbytes() const noexcept = 0;
  /// The group has failed: lets go of whatever waits inside.
  virtual void abort() noexcept = 0;
  /// Ends its threads; what is under way is given up.
  virtual void close() noexcept = 0;
};

}  // namespace pannier
