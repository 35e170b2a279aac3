// In what two checkpoints differ.
#pragma once

#include "pannier/ckpt/checkpoint_reader.h"

namespace pannier::cli {

/// Prints a line for each difference of attributes, tensors and values. Returns whether there was one.
bool print_differences(ckpt::CheckpointReader& first, ckpt::CheckpointReader& second);

}  // namespace pannier::cli
