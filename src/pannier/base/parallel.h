// How floors without torch run work on several threads without owning a pool: the caller hands them a ParallelFor.
// Under torch it is at::parallel_for (one pool, not two that fight); in tests and tools it is a ThreadTeam.
#pragma once

#include <cstdint>
#include <functional>

namespace pannier {

/// Runs `body(begin, end)` over disjoint ranges that cover [0, count) exactly, on one or more threads, and returns when
/// all have ended. `grain` is the smallest range worth a thread. The split never changes results. Exceptions of `body`
/// come out.
using ParallelFor = std::function<void(std::int64_t count, std::int64_t grain,
                                       const std::function<void(std::int64_t, std::int64_t)>& body)>;

/// Runs everything on the calling thread.
inline void serial_for(std::int64_t count, std::int64_t /*grain*/,
                       const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count > 0) {
    body(0, count);
  }
}

}  // namespace pannier
