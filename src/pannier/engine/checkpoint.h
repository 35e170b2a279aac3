// What goes into a checkpoint and comes out of one, as EngineCore's callers see it. What the engine itself holds
// (master weights, moments, step counts, loss scale, counters, random numbers) needs no mention.
//
// Tensors are called "model.NAME" and "optimizer.STATE.NAME". Those of trained parameters are fp32; a tensor of another
// memory order than its shape's (a transposed one) is stored in its own, and "order.NAME" says which.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pannier/kernels/update.h"

namespace pannier {

/// A tensor that the engine does not train, under its name in the state dict.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Bytes by name: flat kByte tensors on the CPU.
using NamedBytes = std::map<std::string, at::Tensor>;

/// What a caller's checkpoint holds beside the engine's own.
struct CheckpointContents {
  std::vector<kernels::Hyperparameters> groups = {};   ///< Values of the parameter groups.
  std::vector<NamedTensor> frozen = {};                ///< Parameters that are not trained; the same on all ranks.
  std::vector<NamedTensor> buffers = {};               ///< May differ between ranks.
  std::map<std::string, std::string> aliases = {};     ///< Other names of tied tensors: other name to first name.
  std::map<std::string, std::string> attributes = {};  ///< Whatever else; rank 0's counts.
  NamedBytes bytes = {};                               ///< Whatever else, of each rank its own.
  bool excludes_frozen = false;                        ///< `frozen` is empty because nobody wants it.
};

/// Where to save.
struct SavePlace {
  std::string folder;      ///< Made where it is missing.
  std::string tag;         ///< The folder in it; empty: "global_step" and the step.
  bool set_latest = true;  ///< Let `latest` name the tag.
};

/// What saving does to training.
struct CheckpointStats {
  bool is_being_written = false;  ///< Beside training.
  double waited_s = 0.0;          ///< How long updates were held back by states that were still to be read.
};

/// What to load.
struct LoadRequest {
  std::string folder;
  std::string tag;               ///< Empty: what `latest` names.
  bool strict = true;            ///< Names of the model's that are missing or unexpected are an error.
  bool optimizer_states = true;  ///< Moments, step counts and loss scale too.
  bool module_only = false;      ///< The model's tensors alone.
  bool parameters = true;        ///< False: the caller has loaded the trained parameters by himself.
  std::size_t num_groups = 0;    ///< Parameter groups that take values over with the states; 0: not looked at.
  std::vector<std::string> schedules = {};  ///< The caller's schedule, then others whose state it takes; none: any.
  std::vector<NamedTensor> frozen = {};
  std::vector<NamedTensor> buffers = {};
};

/// What came of it.
struct LoadedCheckpoint {
  std::string path;                               ///< The tag's folder.
  std::map<std::string, std::string> attributes;  ///< All that the checkpoint has.
  NamedBytes common;                              ///< What rank 0 had put in.
  NamedBytes own;                                 ///< What this rank had; empty where the world was smaller.
  int world_size = 1;                             ///< Of the run that saved.
  std::vector<std::string> missing;               ///< The model has them, the checkpoint does not.
  std::vector<std::string> unexpected;            ///< The opposite.
  std::vector<std::string> missing_states;        ///< Trained parameters whose states started anew.
};

}  // namespace pannier
