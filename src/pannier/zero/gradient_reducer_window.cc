// The rest of a window: reading and replacing gradients before it ends, and what ranks agree on when it does.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <span>

#include "pannier/base/units.h"
#include "pannier/device/compute.h"
#include "pannier/device/dtype.h"
#include "pannier/zero/gradient_reducer.h"

namespace pannier {

std::optional<at::Tensor> GradientReducer::piece(int parameter) {
  share_late();
  std::optional<at::Tensor> sum;
  if (store_.view(parameter).data != nullptr) {
    sum = store_.read(parameter);
  }
  for (FlatGradient& held : sharing_->held(layout().bucket_of(parameter))) {
    if (held.parameter == parameter) {
      sum = sum ? sum->add_(held.values) : std::move(held.values);
    }
  }
  return sum;
}

void GradientReducer::replace(int parameter, const at::Tensor& flat) {
  share_late();
  sharing_->forget(parameter);
  if (const GradientView view = store_.view(parameter); view.data != nullptr) {
    const bool is_wide = view.type == kernels::GradType::kFp32;
    store_.write(parameter, flat.to(is_wide ? at::kFloat : parameters_.dtype(layout().bucket_of(parameter))));
  } else if (flat.numel() > 0) {
    store_.add(parameter, flat.clone(), /*last=*/false);
    store_.flush(layout().bucket_of(parameter));
  }
  judge_anew();
}

// A gradient was changed: what was judged before it went to the host no longer holds.
void GradientReducer::judge_anew() {
  judge_.reset();
  std::fill(judged_.begin(), judged_.end(), false);
}

bool GradientReducer::has_late() const {
  return std::any_of(late_.begin(), late_.end(), [](std::int64_t late) { return late > 0; });
}

void GradientReducer::share_late() {
  std::vector<std::int64_t> late = late_;
  if (communicator_.world_size() > 1) {
    communicator_.sum(late);
  }
  for (int b = 0; b < layout().num_buckets(); ++b) {
    if (late[static_cast<std::size_t>(b)] > 0) {
      close(b);
    }
  }
  sharing_->finish();
}

bool GradientReducer::finish_window(std::int64_t fingerprint) {
  if (in_backward_) {
    end_backward();
  }
  bool is_late = false;
  if (!judge_all(fingerprint, is_late)) {
    return false;
  }
  if (is_late) {
    judge_anew();  // What was judged is not the sum.
    share_late();
    return judge_all(fingerprint, is_late);
  }
  return true;
}

bool GradientReducer::judge_all(std::int64_t fingerprint, bool& is_late) {
  sharing_->finish_window();
  for (int b = 0; b < layout().num_buckets(); ++b) {
    judge_bucket(b);
  }
  return agree(fingerprint, is_late);
}

// The one sum of integers of a step: the judge's numbers, on how many ranks each parameter was used, and a fingerprint
// of what must be the same on all. `is_late`: on some rank gradients wait that came late.
bool GradientReducer::agree(std::int64_t fingerprint, bool& is_late) {
  is_late = false;
  if (communicator_.world_size() == 1) {
    return true;
  }
  std::int64_t sum = 0;
  judge_.exchange([&](std::span<std::int64_t> numbers) {
    std::vector<std::int64_t> all(numbers.begin(), numbers.end());
    all.insert(all.end(), used_.begin(), used_.end());
    all.push_back(fingerprint);
    all.push_back(has_late() ? 1 : 0);
    if (closes_by_unit_ && !recorded_) {
      all.insert(all.end(), stays_open_.begin(), stays_open_.end());
    }
    communicator_.sum(all);
    const auto used = all.begin() + static_cast<std::ptrdiff_t>(numbers.size());
    const auto used_end = used + static_cast<std::ptrdiff_t>(used_.size());
    sum = *used_end;
    is_late = *(used_end + 1) > 0;
    std::copy(all.begin(), used, numbers.begin());
    std::transform(used, used_end, used_.begin(), [](std::int64_t num_ranks) { return num_ranks > 0; });
    std::copy(used_end + 2, all.end(), stays_open_.begin());  // Nothing, in later windows.
  });
  return sum == fingerprint * communicator_.world_size();
}

void GradientReducer::judge_bucket(int bucket) {
  std::vector<GradientRun> on_device;
  for (const ShardPiece& piece : shards_.pieces(bucket)) {
    const GradientView view =
        judged_[static_cast<std::size_t>(piece.parameter)] ? GradientView{} : store_.view(piece.parameter);
    if (view.data == nullptr) {
      continue;
    }
    if (store_.is_on_device(piece.parameter)) {
      on_device.push_back({view.data, view.type, piece.numel, piece.parameter});
    } else {
      judge_.add_stats(kernels::gradient_stats(view.data, view.type, piece.numel, torch_parallel_for()),
                       piece.parameter);
    }
  }
  judge_.add(on_device);
}

void GradientReducer::drop_window(bool complete) {
  in_backward_ = false;
  refused_ = false;
  *unfinished_ = false;
  unfinished_ = std::make_shared<bool>(false);
  for (int b = 0; b < layout().num_buckets(); ++b) {
    open_[static_cast<std::size_t>(b)] = {};
  }
  for (int i = 0; i < layout().num_parameters(); ++i) {
    arrived_[static_cast<std::size_t>(i)] = at::Tensor();
    store_.drop(i);
  }
  std::fill(late_.begin(), late_.end(), 0);
  recorded_ = recorded_ || (complete && backward_index_ > 0);
  if (!recorded_) {
    record_.clear();
    unit_record_.clear();
    std::fill(stays_open_.begin(), stays_open_.end(), 0);
  }
  sharing_->drop();
  backward_index_ = 0;
  std::fill(used_.begin(), used_.end(), false);
  judge_anew();
}

}  // namespace pannier
