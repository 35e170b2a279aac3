// Decides when streamed states go up and when they must be gone. It is told of every tick of a step, compares what the
// model is expected to need until the next tick and until the step's end (plan/memory_curve) with the budget, and moves
// the tide accordingly. Without a budget of the user's, the budget is the most that a step takes without the tide: the
// peak does not rise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "pannier/device/device.h"
#include "pannier/optim/update_routes.h"
#include "pannier/plan/memory_curve.h"
#include "pannier/tier/tide.h"

namespace pannier {

/// Pilots one tide. One thread at a time. What it refers to must outlive it.
class TidePilot {
 public:
  /// `budget`: the device's memory in bytes that everything together may take; empty: what the model itself takes.
  TidePilot(Device& device, Tide& tide, const UpdateRoutes& routes, std::optional<std::size_t> budget);
  ~TidePilot() { tide_.before_lease(nullptr); }
  TidePilot(const TidePilot&) = delete;
  TidePilot& operator=(const TidePilot&) = delete;

  /// Is called in a forward's tick before the step's peak, ahead of any wait for room.
  void on_peak(std::function<void()> call) { on_peak_ = std::move(call); }
  /// The model is about to run `unit`. Waits until the room is free that it needs.
  void tick_forward(int unit);
  /// A backward begins; in the window's last one states may go up.
  void begin_backward(bool is_last) noexcept { may_raise_ = is_last; }
  /// A bucket of gradients is complete.
  void tick_backward(int bucket);
  /// All gradients are there; the update is about to begin.
  void tick_update();
  void end_step();

  /// Free below the budget at the model's peak, and at the update; 0 before a step was seen.
  [[nodiscard]] std::size_t slack_nbytes() const;
  [[nodiscard]] std::size_t room_nbytes() const;
  /// The most device memory that a step takes without streamed states, as far as known.
  [[nodiscard]] std::size_t model_peak() const { return curve_.overall(); }

 private:
  [[nodiscard]] std::size_t budget() const;
  void tick(std::int64_t key);
  void make_way();
  void raise_while_room();
  [[nodiscard]] bool try_raise(int bucket);
  void make_room(int bucket);

  Device& device_;
  Tide& tide_;
  const UpdateRoutes& routes_;
  std::optional<std::size_t> budget_;
  MemoryCurve curve_;
  std::function<void()> on_peak_;
  bool may_raise_ = false;
  /// In a step like the last one all room was made before it is needed; in another the tide gives way.
  std::unique_ptr<Subscription> when_short_;
};

}  // namespace pannier
