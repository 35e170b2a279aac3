// How states on a disk are cut into chunks, and how much host memory their staging takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "pannier/io/io_engine.h"
#include "pannier/layout/state_shape.h"
#include "pannier/tier/state_view.h"

namespace pannier {

/// What a store on a disk is made with.
struct NvmeStateOptions {
  std::vector<std::string> folders = {};  ///< At least one; bytes are striped over them.
  int rank = 0;                           ///< For names in messages.
  bool takes_lock = true;                 ///< One rank of a node does, for all of its run's.
  std::size_t buffer_count = 5;           ///< With the next: the bytes of staging memory.
  std::size_t buffer_nbytes = std::size_t{100} << 20;
  std::size_t host_nbytes = 0;             ///< States that stay in host memory, in bytes at most.
  int most_threads = 1;                    ///< Of torch's, that compute checksums.
  std::string owner = "optimizer states";  ///< What rests there, for accounts and messages.
  /// The configuration's key of buffer_nbytes, for messages.
  std::string buffer_key = "zero_optimization.offload_optimizer.buffer_size";
  IoEngineKind engine = IoEngineKind::kAuto;
  PieceHook* hook = nullptr;  ///< For tests; must outlive the store.
  /// What rests in elements of a bucket's shard, for messages; null: its number.
  std::function<std::string(int bucket, const ElementRange& range)> label = nullptr;
};

/// How options and shards become chunks and buffers: a pure function of numbers.
struct NvmeStaging {
  std::int64_t chunk_numel = 0;  ///< Elements of a chunk.
  std::size_t chunk_nbytes = 0;  ///< Of one chunk, and of one staging buffer.
  std::size_t num_buffers = 0;
  std::size_t host_chunks = 0;  ///< Chunks that stay in host memory.
  std::size_t file_nbytes = 0;  ///< Of the states that rest on the disk.
  [[nodiscard]] std::size_t staging_nbytes() const noexcept { return chunk_nbytes * num_buffers; }
  [[nodiscard]] std::size_t host_nbytes() const noexcept { return chunk_nbytes * host_chunks; }
};
/// Throws ConfigError when a buffer does not hold two blocks of elements.
[[nodiscard]] NvmeStaging nvme_staging(const StateShape& shape, const std::vector<std::int64_t>& bucket_numels,
                                       const NvmeStateOptions& options);

/// Bytes that the disk keeps of one element.
[[nodiscard]] std::size_t bytes_per_element(const StateShape& shape);

}  // namespace pannier
