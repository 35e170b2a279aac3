// A group of ranks over torch.distributed: Gloo for host memory, NCCL for GPUs.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "pannier/comm/communicator.h"
#include "pannier/comm/group_options.h"

namespace c10d {
class ProcessGroup;
}

namespace pannier {

/// A communicator over a process group that nothing else uses: two threads or two owners on one group would corrupt
/// each other's messages. Python makes it with `dist.new_group(backend="cpu:gloo,cuda:nccl")`, or "gloo" or "nccl"
/// alone, and hands over `group.boxed()`; its store carries the monitor's messages. The group's own timeout is set well
/// above ours. Throws ConfigError for a group that has no store, or neither Gloo nor NCCL.
[[nodiscard]] std::unique_ptr<Communicator> make_c10d_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                                   const GroupOptions& options);

}  // namespace pannier
