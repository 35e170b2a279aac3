// Where the buffers of a save or a load come from: the engine's account of host memory, and where its budget leaves no
// room for them, a few small ones beside it.
#pragma once

#include <memory>

#include "pannier/base/error.h"
#include "pannier/ckpt/file_mover.h"
#include "pannier/mem/host_memory.h"

namespace pannier {

/// What `make` makes of `memory`; of `spare` where that has no room.
template <class Make>
auto with_room(HostMemory& memory, HostMemory& spare, const Make& make) {
  try {
    return make(memory);
  } catch (const OutOfMemoryError&) {
    return make(spare);
  }
}

/// As asked for, or the least that works.
[[nodiscard]] inline std::unique_ptr<ckpt::FileMover> make_mover(HostMemory& memory, HostMemory& spare,
                                                                 const ckpt::FileMoverOptions& options) {
  try {
    return std::make_unique<ckpt::FileMover>(memory, options);
  } catch (const OutOfMemoryError&) {
    return std::make_unique<ckpt::FileMover>(spare, ckpt::FileMoverOptions::for_files_of(0));
  }
}

}  // namespace pannier
