#include "pannier/zero/gradient_reducer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <span>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/device/dtype.h"

namespace pannier {

GradientReducer::GradientReducer(const GradientReducerParts& parts)
    : device_(parts.device),
      shards_(parts.shards),
      parameters_(parts.parameters),
      store_(parts.store),
      communicator_(parts.communicator),
      judge_(parts.judge),
      sharing_(parts.make_sharing([this](int bucket, std::vector<FlatGradient> gradients, bool last) {
        deliver(bucket, std::move(gradients), last);
      })),
      listener_(std::make_shared<GradientListener>([this](int parameter) { receive(parameter); })),
      closes_by_unit_(parts.closes_by_unit),
      units_begun_(static_cast<std::size_t>(shards_.buckets().num_buckets())),
      units_ended_(units_begun_.size()),
      ends_before_gradient_(units_begun_.size()),
      stays_open_(units_begun_.size()),
      arrived_(static_cast<std::size_t>(layout().num_parameters())),
      fired_(arrived_.size()),
      used_(fired_.size()),
      judged_(fired_.size()),
      open_(static_cast<std::size_t>(shards_.buckets().num_buckets())),
      late_(open_.size()) {
  for (int i = 0; i < layout().num_parameters(); ++i) {
    hooks_.emplace_back(parameters_.parameter(i), i, listener_);
    const_cast<at::Tensor&>(parameters_.parameter(i)).mutable_grad() = at::Tensor();
  }
}

int GradientReducer::expected(int parameter) const {
  const std::size_t index = backward_index_ - 1;
  return index < record_.size() ? record_[index][static_cast<std::size_t>(parameter)] : 0;
}

void GradientReducer::begin_backward(bool last, std::int64_t divisor) {
  PANNIER_CHECK(!in_backward_, "a backward began inside another");
  store_.free_sent(/*wait=*/true);  // Two backwards' gradients at once are more than was planned.
  in_backward_ = true;
  last_backward_ = last;
  divisor_ = divisor;
  ++backward_index_;
  num_closed_ = 0;
  std::fill(fired_.begin(), fired_.end(), 0);
  std::fill(units_begun_.begin(), units_begun_.end(), 0);
  std::fill(units_ended_.begin(), units_ended_.end(), 0);
  std::fill(ends_before_gradient_.begin(), ends_before_gradient_.end(), 0);
  for (int b = 0; b < layout().num_buckets(); ++b) {
    OpenBucket& open = open_[static_cast<std::size_t>(b)];
    open = {};
    // A parameter that has never fired keeps its bucket open: when it is used one day, it must find it so.
    open.num_waiting = static_cast<int>(layout().buckets()[static_cast<std::size_t>(b)].segments.size());
  }
}

void GradientReducer::check_gradient(int parameter, const at::Tensor& gradient) const {
  const std::string& name = parameters_.name(parameter);
  if (gradient.layout() != at::kStrided) {
    throw ConfigError(
        fmt::format("the gradient of {} is sparse, which is not supported; use sparse=False in its module", name));
  }
  const at::ScalarType dtype = parameters_.dtype(layout().bucket_of(parameter));
  if (gradient.scalar_type() != dtype || gradient.device() != device_.torch_device()) {
    throw ConfigError(fmt::format("the gradient of {} is {} on {}, expected {} on {}", name,
                                  c10::toString(gradient.scalar_type()), gradient.device().str(), c10::toString(dtype),
                                  device_.torch_device().str()));
  }
  if (gradient.grad_fn() != nullptr) {
    throw ConfigError(
        fmt::format("the gradient of {} has a graph of its own: create_graph=True is not supported", name));
  }
}

void GradientReducer::receive(int parameter) {
  const c10::NoGradGuard no_grad;
  at::Tensor& holder = const_cast<at::Tensor&>(parameters_.parameter(parameter)).mutable_grad();
  if (!holder.defined()) {
    return;  // The parameter took part, but the graph gave it nothing.
  }
  try {
    take(parameter, holder);
  } catch (...) {
    refused_ = true;
    holder = at::Tensor();
    throw;
  }
}

// Autograd runs the callback when the backward that is running now ends without an error.
void GradientReducer::watch_end() {
  if (!*unfinished_) {
    *unfinished_ = true;
    torch::autograd::Engine::get_default_engine().queue_callback([flag = unfinished_] { *flag = false; });
  }
}

void GradientReducer::take(int parameter, at::Tensor& holder) {
  check_gradient(parameter, holder);
  if (!in_backward_) {
    begin_unannounced_(parameter);
  }
  watch_end();
  const at::Tensor gradient = std::exchange(holder, at::Tensor());
  const auto index = static_cast<std::size_t>(parameter);
  const int bucket = layout().bucket_of(parameter);
  OpenBucket& open = open_[static_cast<std::size_t>(bucket)];
  if (open.closed) {
    late_[static_cast<std::size_t>(bucket)] = 1;
  }
  at::Tensor flat = flat_gradient(parameter, gradient);
  if (divisor_ > 1) {
    flat.div_(static_cast<double>(divisor_));
  }
  if (!arrived_[index].defined()) {
    device_.reassign(flat, Owner::kGradients);
    arrived_[index] = std::move(flat);
  } else {
    arrived_[index].add_(flat);
  }
  ++fired_[index];
  used_[index] = true;
  if (!recorded_ && closes_by_unit_) {
    const auto b = static_cast<std::size_t>(bucket);
    ends_before_gradient_[b] = units_begun_[b] == units_ended_[b] ? units_ended_[b] : 0;
  }
  if (recorded_ && !closes_by_unit_ && fired_[index] == expected(parameter) && --open.num_waiting == 0) {
    close_full(bucket);
  }
}

void GradientReducer::unit_began(const std::vector<int>& buckets) {
  for (const int bucket : buckets) {
    if (bucket < layout().num_buckets()) {  // Those after them are frozen.
      ++units_begun_[static_cast<std::size_t>(bucket)];
    }
  }
}

void GradientReducer::unit_ended(const std::vector<int>& buckets) {
  if (!in_backward_ || !closes_by_unit_) {
    return;
  }
  for (const int bucket : buckets) {
    if (bucket >= layout().num_buckets()) {
      continue;
    }
    const auto index = static_cast<std::size_t>(bucket);
    ++units_ended_[index];
    if (recorded_ && stays_open_[index] == 0 && backward_index_ <= unit_record_.size() &&
        units_ended_[index] == unit_record_[backward_index_ - 1][index]) {
      close_full(bucket);
    }
  }
}

void GradientReducer::close_full(int bucket) {
  if (!sharing_->in_order()) {
    close(bucket);
    return;
  }
  open_[static_cast<std::size_t>(bucket)].full = true;
  while (num_closed_ < layout().num_buckets() && open_[static_cast<std::size_t>(num_closed_)].full) {
    close(num_closed_++);
  }
}

// The gradient in the parameter's own order of elements. It is taken as it is where it lies so, alone in its memory;
// torch sees to that, and copies what somebody else kept. What a hook of the user's put there instead may need a copy.
at::Tensor GradientReducer::flat_gradient(int parameter, const at::Tensor& gradient) {
  const std::int64_t numel = gradient.numel();
  const bool is_its_own = gradient.use_count() == 1 && gradient.storage().nbytes() == gradient.nbytes() &&
                          parameters_.is_packed(gradient, parameter);
  if (is_its_own) {
    return gradient.as_strided({numel}, {1});
  }
  const at::Tensor flat = device_.allocate(numel, gradient.scalar_type(), Owner::kGradients);
  parameters_.view_like_parameter(flat, parameter).copy_(gradient);
  return flat;
}

void GradientReducer::close(int bucket) {
  open_[static_cast<std::size_t>(bucket)].closed = true;
  late_[static_cast<std::size_t>(bucket)] = 0;
  store_.free_sent(/*wait=*/false);
  std::vector<FlatGradient> gradients;
  for (const Segment& segment : layout().buckets()[static_cast<std::size_t>(bucket)].segments) {
    at::Tensor& arrived = arrived_[static_cast<std::size_t>(segment.parameter)];
    if (arrived.defined()) {
      gradients.push_back({segment.parameter, std::exchange(arrived, at::Tensor())});
    }
  }
  sharing_->take(bucket, std::move(gradients), last_backward_);
}

void GradientReducer::deliver(int bucket, std::vector<FlatGradient> gradients, bool last) {
  // Judged before the store takes any: taking one, it may let go of another that has arrived on the host.
  std::vector<GradientRun> leaving;
  for (const FlatGradient& gradient : gradients) {
    const at::Tensor& values = gradient.values;
    if (is_judged_early(values, gradient.parameter, last)) {
      leaving.push_back({values.data_ptr(), grad_type_of(values.scalar_type()), values.numel(), gradient.parameter});
    }
  }
  judge_.add(leaving);
  for (const GradientRun& run : leaving) {
    judged_[static_cast<std::size_t>(run.parameter)] = true;
  }
  for (FlatGradient& gradient : gradients) {
    store_.add(gradient.parameter, std::move(gradient.values), last);
  }
  store_.flush(bucket);
  if (closed_) {
    closed_(bucket);
  }
}

// A gradient that will go to the host is judged before it leaves, where that is cheap. What rests on the device is
// judged at the window's end, all at once.
bool GradientReducer::is_judged_early(const at::Tensor& gradient, int parameter, bool last) {
  if (judged_[static_cast<std::size_t>(parameter)]) {
    judge_anew();  // It was not the last micro-batch after all: what was judged is not the sum.
    return false;
  }
  return last && gradient.numel() > 0 && !store_.is_on_device(parameter) && store_.view(parameter).data == nullptr;
}

void GradientReducer::end_backward() {
  PANNIER_CHECK(in_backward_, "a backward ended that had not begun");
  for (int b = 0; b < layout().num_buckets(); ++b) {
    if (!open_[static_cast<std::size_t>(b)].closed) {
      close(b);
    }
  }
  if (communicator_.world_size() == 1) {
    share_late();  // Among ranks only all together know that there is something.
  }
  sharing_->finish();
  in_backward_ = false;
  store_.free_sent(/*wait=*/false);
  if (record_.size() < backward_index_) {
    record_.push_back(fired_);
    unit_record_.push_back(units_ended_);
    for (std::size_t b = 0; b < units_ended_.size(); ++b) {
      const bool ends_late = ends_before_gradient_[b] > 0 && ends_before_gradient_[b] == units_ended_[b];
      stays_open_[b] = stays_open_[b] > 0 || units_begun_[b] != units_ended_[b] || ends_late ? 1 : 0;
    }
    return;
  }
  auto& record = record_[backward_index_ - 1];
  for (std::size_t i = 0; i < record.size(); ++i) {
    record[i] = std::max(record[i], fired_[i]);
  }
}

void GradientReducer::renew_hooks() {
  for (int i = 0; i < layout().num_parameters(); ++i) {
    const at::Tensor& parameter = parameters_.parameter(i);
    if (parameter.requires_grad() && !hooks_[static_cast<std::size_t>(i)].is_on(parameter)) {
      hooks_[static_cast<std::size_t>(i)] = GradientHook(parameter, i, listener_);
    }
  }
}

void GradientReducer::check_hooks() {
  for (int i = 0; i < layout().num_parameters(); ++i) {
    const at::Tensor& parameter = parameters_.parameter(i);
    if (!parameter.requires_grad()) {
      continue;  // Frozen for now: it gets no gradient and so no update.
    }
    if (!hooks_[static_cast<std::size_t>(i)].is_on(parameter)) {
      const_cast<at::Tensor&>(parameter).mutable_grad() = at::Tensor();
      renew_hooks();
      throw ConfigError(fmt::format(
          "parameter {} was converted or replaced since its backward began, so its gradients are lost; this "
          "window's gradients are dropped",
          parameters_.name(i)));
    }
    if (parameter.grad().defined()) {
      const_cast<at::Tensor&>(parameter).mutable_grad() = at::Tensor();  // Else the next backward would add to it.
      throw ConfigError(fmt::format(
          "parameter {} holds a gradient in .grad at step(), which the engine would not use: gradients come "
          "from backward; to change them use the engine's own functions",
          parameters_.name(i)));
    }
  }
}

}  // namespace pannier
