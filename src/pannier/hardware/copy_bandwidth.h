// How fast this machine's memory is, measured.
#pragma once

#include <cstddef>

#include "pannier/base/parallel.h"

namespace pannier {

/// Copies `nbytes` between two buffers on the threads of `parallel_for`, a few times by each of
/// available_copy_kernels(), and returns the best rate in bytes per second, read and written bytes together. `nbytes`
/// should be well above the caches; takes about half a second and 2 x nbytes of memory. Throws ConfigError when
/// `nbytes` is zero.
[[nodiscard]] double probe_copy_bandwidth(const ParallelFor& parallel_for, std::size_t nbytes = std::size_t{128} << 20);

}  // namespace pannier
