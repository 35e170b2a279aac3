// Reads this rank's ranges of the trained parameters and their states into the engine: in the order in which chunks
// rest, so that each chunk and each byte of the checkpoint is touched once, and ahead of their use.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pannier/ckpt/verified_reads.h"
#include "pannier/engine/checkpoint.h"
#include "pannier/optim/bucket_states.h"
#include "pannier/zero/build_parts.h"

namespace pannier {

/// Which of them are loaded.
struct StateSelection {
  bool parameters = true;
  bool states = true;
};

/// Loads once. Of the engine's thread. What it refers to must outlive it.
class StateLoading {
 public:
  StateLoading(ckpt::CheckpointReader& reader, Parts& parts, const StateSelection& selection)
      : reader_(reader), parts_(parts), selection_(selection) {}

  /// What will be read, in order.
  [[nodiscard]] std::vector<ckpt::TensorRun> runs();
  /// Reads it from `reads`, which was given runs() first. What the checkpoint does not have starts anew. Throws
  /// IoError.
  void load(ckpt::VerifiedReads& reads);

 private:
  /// Elements of one state of a parameter, within one chunk.
  struct Part {
    int bucket = 0;
    int parameter = 0;
    std::string state;   ///< kMasterName, or one of the pipeline's state_names().
    std::string tensor;  ///< The checkpoint's.
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  void for_each_part(const std::function<void(const Part&)>& use);
  [[nodiscard]] std::string stored_name(int parameter) const;
  [[nodiscard]] bool is_in_runs(const Part& part) const;
  void load_part(const Part& part, ckpt::VerifiedReads& reads, BucketStates& states);
  [[nodiscard]] float initial_value(const std::string& state) const;

  ckpt::CheckpointReader& reader_;
  Parts& parts_;
  StateSelection selection_;
  std::map<std::string, std::vector<float>> turned_;  ///< Tensors of the present bucket that lie in another order.
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
};

}  // namespace pannier
