// Collectives behind one small interface, so that one rank and many ranks run the same engine. Only what the engine
// calls is here; a group of many ranks implements it over torch.distributed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace pannier {

/// A group of ranks. Every rank calls the same operations in the same order. One thread.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int world_size() const noexcept = 0;
  /// Replaces each value by its sum over ranks: the one integer sum of a step, with the norm's limbs and the non-finite
  /// count.
  virtual void sum(std::span<std::int64_t> values) = 0;
};

/// A world of one: every sum is its own value.
[[nodiscard]] std::unique_ptr<Communicator> make_solo_communicator();

}  // namespace pannier
