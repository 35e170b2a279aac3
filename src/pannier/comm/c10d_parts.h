// The pieces of a c10d group; only the sources named c10d_* see c10d.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "pannier/comm/group_state.h"
#include "pannier/comm/key_value_store.h"
#include "pannier/comm/monitor.h"
#include "pannier/comm/transport.h"

namespace pannier {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The store under a prefix of ours. A clone has a connection of its own where the store has connections: there a get
/// that waits would block everybody else.
[[nodiscard]] std::unique_ptr<KeyValueStore> make_c10d_store(const c10::intrusive_ptr<c10d::Store>& store);

/// Host memory, point to point over Gloo, by one thread that is the only one to use the group.
[[nodiscard]] std::shared_ptr<Transport> make_gloo_transport(ProcessGroupPtr group, std::shared_ptr<GroupState> state,
                                                             std::shared_ptr<Monitor> monitor);

/// Device memory over NCCL, on the caller's current stream.
class NcclTransport;
[[nodiscard]] std::shared_ptr<NcclTransport> make_nccl_transport(ProcessGroupPtr group);
[[nodiscard]] std::shared_ptr<Transport> as_transport(const std::shared_ptr<NcclTransport>& transport);
/// Looks for operations that have failed or are over their deadline, and reports them. Called by the monitor's thread.
void poll(NcclTransport& transport, Monitor& monitor, std::chrono::milliseconds timeout);

/// Keeps alive until the process ends what a library may still write to.
void keep_until_exit(std::shared_ptr<void> buffers);

}  // namespace pannier
