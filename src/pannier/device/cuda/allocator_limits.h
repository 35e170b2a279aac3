// Limits around torch's CUDA allocator: what engines may plan with, what the allocator may still take, and who gives
// memory back when it finds none.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "pannier/device/device.h"

namespace pannier {

/// What engines were allowed on each GPU, the least counting. Plans keep to it; the allocator is not told, since it
/// counts whole segments, of which a part is always unused. Who wants a wall sets torch's memory fraction. Thread-safe.
namespace device_caps {
void add(c10::DeviceIndex device, std::size_t nbytes);
void remove(c10::DeviceIndex device, std::size_t nbytes) noexcept;
/// 0: none.
[[nodiscard]] std::size_t least(c10::DeviceIndex device);
}  // namespace device_caps

/// What torch's allocator may still take from the driver: the user can have limited it to a fraction of the device.
[[nodiscard]] std::size_t left_of_fraction(c10::DeviceIndex device, std::size_t total);

/// States that come and go between activations would cut torch's segments up, so that large activations find no whole
/// one; segments that can grow don't have that trouble. A setting of the user's stays.
void let_segments_grow();

/// Calls `give_back` when the allocator is about to fail, with its lock held, until the subscription ends.
[[nodiscard]] std::unique_ptr<Subscription> when_allocator_is_short(std::function<bool()> give_back);

}  // namespace pannier
