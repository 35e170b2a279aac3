#include "pannier/mem/host_slab.h"

#include <fmt/format.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "pannier/base/units.h"

namespace pannier {
namespace {

// The memory that is filled between two looks at what the machine has left.
constexpr std::size_t kFillStepBytes = std::size_t{256} << 20;
// The smallest range worth a thread, in huge pages.
constexpr std::int64_t kFillGrain = 4;
constexpr std::size_t kSmallestPageBytes = 4096;

using NodeMask = std::unique_ptr<bitmask, decltype(&numa_bitmask_free)>;

GuardedMapping map_or_explain(HostMemory& memory, std::size_t nbytes, const std::string& owner) {
  try {
    return GuardedMapping(nbytes);
  } catch (const std::system_error& error) {
    throw OutOfMemoryError(
        fmt::format("host out of memory. Tried to allocate {} for {}, {} free, but the kernel refused: {}",
                    format_bytes(nbytes), owner, format_bytes(memory.free_bytes()), error.what()));
  }
}

// Tells the kernel where the pages shall come from. False when it refuses: containers often may not ask.
bool bind_to_nodes(const GuardedMapping& mapping, const HostSlabOptions& options) {
  if (options.numa_policy == NumaPolicy::kFirstTouch) {
    return true;
  }
  const bool has_numa = ::numa_available() >= 0;
  if (options.numa_policy == NumaPolicy::kNode) {
    const auto node = static_cast<unsigned int>(options.numa_node);
    const bool exists = has_numa ? ::numa_bitmask_isbitset(numa_all_nodes_ptr, node) != 0 : node == 0;
    if (!exists) {
      throw ConfigError(fmt::format("numa_node {} is not among the nodes that this process may use", node));
    }
  }
  if (!has_numa) {
    return true;  // There is one node, so all memory is where it was asked for.
  }
  NodeMask nodes(::numa_allocate_nodemask(), &::numa_bitmask_free);
  // Preferred, not bound: a full node must not end in the process being killed.
  const int mode = options.numa_policy == NumaPolicy::kInterleave ? MPOL_INTERLEAVE : MPOL_PREFERRED;
  if (options.numa_policy == NumaPolicy::kInterleave) {
    ::copy_bitmask_to_bitmask(numa_all_nodes_ptr, nodes.get());
  } else {
    ::numa_bitmask_setbit(nodes.get(), static_cast<unsigned int>(options.numa_node));
  }
  return ::mbind(mapping.begin(), mapping.mapped_bytes(), mode, nodes->maskp, nodes->size + 1, 0) == 0 ||
         ::numa_num_configured_nodes() == 1;
}

// Faults every page in by a write of the zero that it holds, on the threads of `parallel_for`.
void touch(std::span<std::byte> bytes, const ParallelFor& parallel_for) {
  const auto blocks = (bytes.size() + kHugePageBytes - 1) / kHugePageBytes;
  parallel_for(static_cast<std::int64_t>(blocks), kFillGrain, [&](std::int64_t first, std::int64_t last) {
    const auto end = std::min(static_cast<std::size_t>(last) * kHugePageBytes, bytes.size());
    for (auto at = static_cast<std::size_t>(first) * kHugePageBytes; at < end; at += kSmallestPageBytes) {
      *static_cast<volatile std::byte*>(&bytes[at]) = std::byte{0};
    }
  });
}

// The address range of an smaps line such as "7f0c2a600000-7f0c2a800000 rw-p ..."; empty for other lines.
std::pair<std::uintptr_t, std::uintptr_t> address_range(std::string_view line) {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  const auto* const last = line.data() + line.size();
  const auto [dash, error] = std::from_chars(line.data(), last, begin, 16);
  if (error != std::errc() || dash == last || *dash != '-' ||
      std::from_chars(dash + 1, last, end, 16).ec != std::errc()) {
    return {0, 0};
  }
  return {begin, end};
}

}  // namespace

void HostSlabOptions::validate() const {
  if (owner.empty()) {
    throw ConfigError("a host slab needs an owner, for the account and for errors");
  }
  if ((numa_policy == NumaPolicy::kNode) != (numa_node >= 0)) {
    throw ConfigError(
        fmt::format("numa_node {} of slab '{}' goes with the node policy, and only with it", numa_node, owner));
  }
}

HostSlab::HostSlab(HostMemory& memory, std::size_t nbytes, const HostSlabOptions& options,
                   const ParallelFor& parallel_for) {
  options.validate();
  claim_ = memory.claim(options.owner, round_up_to_page(nbytes));
  mapping_ = map_or_explain(memory, nbytes, options.owner);
  numa_placed_ = bind_to_nodes(mapping_, options);
  if (nbytes > 0) {
    // A kernel without transparent huge pages refuses both, and small pages it is.
    ::madvise(mapping_.begin(), mapping_.mapped_bytes(), options.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    fill(parallel_for);
  }
}

HostSlab& HostSlab::operator=(HostSlab&& other) noexcept {
  mapping_ = std::move(other.mapping_);  // First, as in destruction: unmap, then give back.
  claim_ = std::move(other.claim_);
  numa_placed_ = other.numa_placed_;
  return *this;
}

void HostSlab::fill(const ParallelFor& parallel_for) {
  const std::span<std::byte> all(mapping_.begin(), mapping_.mapped_bytes());
  for (std::size_t at = 0; at < all.size(); at += kFillStepBytes) {
    if (at > 0) {
      claim_.recheck();
    }
    const auto step = all.subspan(at, std::min(kFillStepBytes, all.size() - at));
    touch(step, parallel_for);
    claim_.settle(step.size());
  }
}

std::size_t resident_bytes(const HostSlab& slab) {
  if (slab.data().empty()) {
    return 0;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(slab.data().data());
  const auto end = begin + slab.mapped_bytes();
  std::ifstream smaps("/proc/self/smaps");
  if (!smaps) {
    throw IoError("open /proc/self/smaps", errno);
  }
  std::size_t total = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (const auto [first, last] = address_range(line); last != 0) {
      PANNIER_CHECK(last <= begin || first >= end || (first >= begin && last <= end),
                    fmt::format("slab '{}' shares a mapping with its neighbour: {}", slab.owner(), line));
      inside = first >= begin && last <= end;
    } else if (std::size_t kib = 0; inside && line.starts_with("Rss:")) {
      const auto digits = std::min(line.find_first_of("0123456789"), line.size());
      std::from_chars(line.data() + digits, line.data() + line.size(), kib);
      total += kib * 1024;
    }
  }
  return total;
}

}  // namespace pannier
