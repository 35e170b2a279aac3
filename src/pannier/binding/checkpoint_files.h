// Checkpoints on disk as Python sees them, without an engine: for conversions.
#pragma once

#include <torch/library.h>

namespace pannier::binding {

/// Registers torch.classes.pannier.CheckpointFile and CheckpointBuilder.
void define_checkpoint_files(torch::Library& library);

}  // namespace pannier::binding
