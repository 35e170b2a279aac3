// What a save holds beside the states of trained parameters: small things, which are copied at the call, and frozen
// parameters, which nobody is expected to change before they are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pannier/ckpt/manifest.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// A copy of a tensor in host memory.
struct TensorCopy {
  ckpt::TensorInfo info;
  std::vector<std::byte> bytes;
};

/// One rank's.
struct SavedContents {
  std::vector<NamedTensor> frozen = {};     ///< Whole ones that this rank writes, in rows.
  std::vector<std::int64_t> versions = {};  ///< Of each at the call.
  std::vector<TensorCopy> buffers = {};     ///< Those that this rank writes.
  std::vector<TensorCopy> extras = {};      ///< What this rank keeps for itself.
  ckpt::Manifest manifest = {};             ///< All but what files hold.
};

/// Checksums of buffers, by which ranks know whose differ.
[[nodiscard]] std::vector<std::uint64_t> buffer_sums(Device& device, const std::vector<NamedTensor>& buffers);

/// Copies what must be copied. `parts` may be null. `sums_of_rank_0`: empty where there is one rank.
[[nodiscard]] SavedContents take_contents(Device& device, const Communicator& ranks, const Parts* parts,
                                          const CheckpointContents& contents,
                                          const std::vector<std::uint64_t>& sums_of_rank_0);

}  // namespace pannier
