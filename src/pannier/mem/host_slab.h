// Host memory in exact sizes. torch's pinned allocator rounds up to a power of two and malloc keeps what it frees; a
// slab is one mapping of its own, rounded up to the page and no further. It begins on a huge-page boundary, lies
// between two inaccessible guard pages (so that the kernel merges it with nothing, and counts it alone in smaps), is
// placed on the NUMA nodes it was asked for, is zero, is wholly resident, and is not inherited by forked children
// (whose copies on write would double it).
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include "pannier/base/error.h"
#include "pannier/base/parallel.h"
#include "pannier/mem/guarded_mapping.h"
#include "pannier/mem/host_memory.h"

namespace pannier {

/// Which NUMA node the pages of a slab come from.
enum class NumaPolicy {
  kFirstTouch,  ///< The node of the thread that fills the page: near the threads that will update it.
  kNode,        ///< `numa_node`, others when that one is full.
  kInterleave,  ///< All nodes that this process may use, in turn.
};

/// Options of HostSlab.
struct HostSlabOptions {
  std::string owner = {};                            ///< What the memory is for; errors and the account name it.
  NumaPolicy numa_policy = NumaPolicy::kFirstTouch;  ///< Where the pages come from.
  int numa_node = -1;                                ///< For kNode only.
  bool huge_pages = true;                            ///< Back whole 2 MiB ranges by huge pages where there are any.
  /// Throws ConfigError when the fields contradict each other.
  void validate() const;
};

/// Owns one zero-filled, resident mapping. Move-only; not thread-safe itself, its bytes are the user's business.
class HostSlab {
 public:
  /// An empty slab.
  HostSlab() noexcept = default;

  /// Maps `nbytes` rounded up to the page, and zero-fills them on the threads of `parallel_for`. Throws
  /// OutOfMemoryError naming the owner when budget, machine or kernel refuse, before anything is touched where
  /// possible; ConfigError for a NUMA node that is not there. `memory` must outlive the slab.
  HostSlab(HostMemory& memory, std::size_t nbytes, const HostSlabOptions& options,
           const ParallelFor& parallel_for = serial_for);
  HostSlab(HostSlab&& other) noexcept = default;
  HostSlab& operator=(HostSlab&& other) noexcept;
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;
  ~HostSlab() = default;

  /// The bytes asked for. Begins on a multiple of 2 MiB when there are that many, else on a page.
  [[nodiscard]] std::span<std::byte> data() noexcept { return {mapping_.begin(), mapping_.nbytes()}; }
  [[nodiscard]] std::span<const std::byte> data() const noexcept { return {mapping_.begin(), mapping_.nbytes()}; }

  /// The same bytes as elements; their size must be a multiple of the element's.
  template <class T>
  [[nodiscard]] std::span<T> as() {
    static_assert(std::is_trivially_copyable_v<T>);
    PANNIER_CHECK(nbytes() % sizeof(T) == 0, "slab of " + std::to_string(nbytes()) +
                                                 " bytes holds no whole number of " + std::to_string(sizeof(T)) +
                                                 "-byte elements");
    return {reinterpret_cast<T*>(mapping_.begin()), nbytes() / sizeof(T)};
  }
  /// The same, for reading.
  template <class T>
  [[nodiscard]] std::span<const T> as() const {
    return const_cast<HostSlab*>(this)->as<T>();
  }

  [[nodiscard]] std::size_t nbytes() const noexcept { return mapping_.nbytes(); }
  /// What is mapped and counted: nbytes() rounded up to the page.
  [[nodiscard]] std::size_t mapped_bytes() const noexcept { return mapping_.mapped_bytes(); }
  [[nodiscard]] const std::string& owner() const noexcept { return claim_.owner(); }
  /// False when the kernel refused the NUMA policy (a container may not be allowed to set one): a matter of speed only.
  [[nodiscard]] bool numa_placed() const noexcept { return numa_placed_; }

 private:
  void fill(const ParallelFor& parallel_for);

  HostClaim claim_;  ///< Before the mapping, so that bytes are given back when they are unmapped, not sooner.
  GuardedMapping mapping_;
  bool numa_placed_ = true;
};

/// The bytes of the slab that the kernel counts as resident (Rss in /proc/self/smaps). Throws IoError when the file
/// cannot be read.
[[nodiscard]] std::size_t resident_bytes(const HostSlab& slab);

}  // namespace pannier
