// Saving and loading as Python sees them: tensors in lists beside their names, bytes in dicts.
#pragma once

#include <torch/custom_class.h>

#include "pannier/binding/classes.h"

namespace pannier::binding {

/// Adds the engine's methods to its class.
void define_checkpoint(torch::class_<EngineHolder>& engine);

}  // namespace pannier::binding
