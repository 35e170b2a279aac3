// A communicator alone, as Python sees it: for tests of many ranks over torch.distributed, without an engine.
#pragma once

#include <torch/library.h>

namespace pannier::binding {

/// Registers torch.classes.pannier.CommunicatorProbe.
void define_comm_probe(torch::Library& library);

}  // namespace pannier::binding
