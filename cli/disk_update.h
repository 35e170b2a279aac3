// What an update of states on a disk costs beside their way from the disk and back: the same chunks are leased and
// given back with and without it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pannier/mem/host_slab.h"
#include "pannier/tier/nvme_state_store.h"

namespace pannier::cli {

/// States of AdamW and bf16 in a folder, with gradients in host memory. One thread.
class DiskUpdate {
 public:
  /// `nbytes`: of the file.
  DiskUpdate(const std::string& folder, std::size_t nbytes, int most_threads);

  /// Reads and writes all states once, from front to back and from back to front in turn, until they are at rest.
  /// Returns the seconds.
  double pass(bool updates);
  /// Bytes that all passes have moved, both ways.
  [[nodiscard]] double moved_nbytes() const;

 private:
  HostMemory memory_;
  std::vector<std::int64_t> numels_;
  NvmeStateStore store_;
  HostSlab gradients_;
  int most_threads_;
  std::vector<ChunkId> chunks_;
  std::vector<std::uint64_t> sums_;  ///< Of the chunks, by their numbers from front to back.
  bool goes_back_ = false;
  int step_ = 0;
};

}  // namespace pannier::cli
