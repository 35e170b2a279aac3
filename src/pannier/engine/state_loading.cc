#include "pannier/engine/state_loading.h"

#include <algorithm>
#include <optional>

#include "pannier/engine/checkpoint_tensors.h"
#include "pannier/engine/stored_values.h"

namespace pannier {
namespace {

constexpr std::int64_t kStepNumel = std::int64_t{64} << 10;

}  // namespace

// A tied tensor is stored under one of its names.
std::string StateLoading::stored_name(int parameter) const {
  const std::string& name = parts_.parameters->name(parameter);
  return reader_.find(model_tensor(name)) != nullptr ? name : reader_.attribute("alias." + name, name);
}

// In the order in which a rank's files have them.
void StateLoading::for_each_part(const std::function<void(const Part&)>& use) {
  for (int b = parts_.layout->num_buckets() - 1; b >= 0; --b) {
    const StateStore& store = *parts_.routes->rest_way(b).states;
    for (int c = 0; c < store.num_chunks(b); ++c) {
      const ElementRange chunk = store.range({b, c});
      for (const ShardPiece& piece : parts_.shards->pieces(b)) {
        const ElementRange range = common({piece.shard_offset, piece.shard_offset + piece.numel}, chunk);
        if (range.numel() == 0) {
          continue;
        }
        const std::string name = stored_name(piece.parameter);
        const std::int64_t begin = piece.parameter_offset + range.begin - piece.shard_offset;
        Part part{b, piece.parameter, kMasterName, model_tensor(name), begin, begin + range.numel()};
        if (selection_.parameters && reader_.find(part.tensor) != nullptr) {
          use(part);
        }
        for (const auto& state : parts_.pipeline->state_names()) {
          part.state = state;
          part.tensor = state_tensor(state, name);
          if (selection_.states) {
            use(part);
          }
        }
      }
    }
  }
}

bool StateLoading::is_in_runs(const Part& part) const {
  if (reader_.find(part.tensor) == nullptr) {
    return false;
  }
  const at::Tensor& owner = parts_.parameters->parameter(part.parameter);
  return lies_as_stored(reader_, part.tensor, reader_.attribute("order." + stored_name(part.parameter)), owner.sizes(),
                        memory_order(owner.sizes(), owner.strides()));
}

std::vector<ckpt::TensorRun> StateLoading::runs() {
  std::vector<ckpt::TensorRun> runs;
  for_each_part([&](const Part& part) {
    if (is_in_runs(part)) {
      runs.push_back({part.tensor, part.begin, part.end});
    }
  });
  return runs;
}

void StateLoading::load(ckpt::VerifiedReads& reads) {
  std::optional<BucketStates> states;
  int bucket = -1;
  for_each_part([&](const Part& part) {
    if (part.bucket != bucket) {
      if (states) {
        states->close();
      }
      turned_.clear();
      bucket = part.bucket;
      states.emplace(parts_.pipeline->parts(), bucket);
    }
    load_part(part, reads, *states);
  });
  if (states) {
    states->close();
  }
  turned_.clear();
}

// What is not there starts anew.
float StateLoading::initial_value(const std::string& state) const {
  return state == parts_.pipeline->state_names().front() ? static_cast<float>(parts_.pipeline->parts().initial_state1)
                                                         : 0.0F;
}

void StateLoading::load_part(const Part& part, ckpt::VerifiedReads& reads, BucketStates& states) {
  const ckpt::TensorInfo* info = reader_.find(part.tensor);
  const bool is_in_runs = this->is_in_runs(part);
  if (info != nullptr && !is_in_runs && !turned_.contains(part.tensor)) {
    const at::Tensor& owner = parts_.parameters->parameter(part.parameter);
    turned_[part.tensor] = read_turned(reader_, part.tensor, reader_.attribute("order." + stored_name(part.parameter)),
                                       owner.sizes(), memory_order(owner.sizes(), owner.strides()));
  }
  for (std::int64_t at = part.begin; at < part.end; at += kStepNumel) {
    const std::int64_t end = std::min(part.end, at + kStepNumel);
    values_.resize(static_cast<std::size_t>(end - at));
    if (info == nullptr) {
      std::fill(values_.begin(), values_.end(), initial_value(part.state));
    } else if (!is_in_runs) {
      std::copy_n(turned_.at(part.tensor).begin() + at, values_.size(), values_.begin());
    } else if (info->dtype == ckpt::DType::kF32) {
      reads.read(std::as_writable_bytes(std::span(values_)));
    } else {
      bytes_.resize(values_.size() * dtype_nbytes(info->dtype));
      reads.read(bytes_);
      to_floats(bytes_, info->dtype, values_);
    }
    states.write(part.parameter, part.state, at, values_);
  }
}

}  // namespace pannier
