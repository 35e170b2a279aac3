#include "pannier/tier/tide.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {
namespace {

// Where the arrays of a bucket's state begin.
void* first_array(const StateView& states) {
  return states.state1 != nullptr ? static_cast<void*>(states.state1) : states.rest;
}

}  // namespace

Tide::Tide(TideParts parts)
    : StateStore(parts.bucket_numels), parts_(std::move(parts)), slots_(parts_.bucket_numels.size()) {
  parts_.host.before_lease([this](int bucket) { recall(bucket); });
}

Tide::~Tide() {
  parts_.host.before_lease(nullptr);
  for (const Slot& slot : slots_) {
    for (const TransferPtr& transfer : {slot.up, slot.down}) {
      if (transfer) {
        transfer->wait_ended();  // Of a buffer that goes now.
      }
    }
  }
}

std::size_t Tide::live_nbytes() const noexcept {
  const std::lock_guard lock(mutex_);
  return live_nbytes_;
}

bool Tide::give_back() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return false;
  }
  const std::size_t before = live_nbytes_;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].buffer.defined() && !slots_[i].leased) {
      try {
        recall(static_cast<int>(i));
      } catch (...) {
        break;  // The caller is an allocator; whoever needs the state next is told.
      }
    }
  }
  return live_nbytes_ < before;
}

HostBucketLayout Tide::layout(int bucket) const {
  return host_bucket_layout(parts_.shape, parts_.bucket_numels.at(static_cast<std::size_t>(bucket)));
}

std::size_t Tide::param_nbytes(int bucket) const {
  return nbytes_of(parts_.bucket_numels[static_cast<std::size_t>(bucket)], parts_.shape.param_nbytes);
}

std::size_t Tide::nbytes(int bucket) const {
  return state_nbytes(bucket) + (at_rest(bucket) == nullptr ? 0 : param_nbytes(bucket));
}

bool Tide::is_up(int bucket) const {
  const std::lock_guard lock(mutex_);
  return slots_.at(static_cast<std::size_t>(bucket)).buffer.defined();
}

bool Tide::is_ready(int bucket) const {
  const std::lock_guard lock(mutex_);
  const Slot& slot = slots_.at(static_cast<std::size_t>(bucket));
  return slot.buffer.defined() && (!slot.up || slot.up->is_issued());
}

void* Tide::param_in(const at::Tensor& buffer, int bucket) const {
  return static_cast<std::byte*>(buffer.data_ptr()) + state_nbytes(bucket);
}

void Tide::raise(int bucket) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_.at(static_cast<std::size_t>(bucket));
  if (!slot.buffer.defined()) {
    const std::size_t size = nbytes(bucket);
    at::Tensor buffer = parts_.device.allocate(static_cast<std::int64_t>(size), at::kByte, Owner::kStreamedStates);
    const StateView& host = parts_.host.view(bucket);
    std::vector<CopyRun> runs{{buffer.data_ptr(), first_array(host), state_nbytes(bucket)}};
    TransferPtr written = slot.down;
    if (ParameterShards* const rest = at_rest(bucket); rest != nullptr) {
      runs.push_back({param_in(buffer, bucket), rest->host_address(bucket), param_nbytes(bucket)});
      written = rest->on_its_way_down(bucket);  // The states' own way down was over when their buffer was freed.
    }
    // The allocator may hand out memory that work already queued still uses, so the copy waits for that work.
    slot.up =
        parts_.up.push(std::move(runs), {parts_.device.record(Queue::kCompute)}, std::move(written), "states", bucket);
    slot.down = nullptr;
    slot.buffer = std::move(buffer);
    live_nbytes_ += size;
  }
  slot.raised = true;
}

void Tide::require_whole() const {
  if (broken_) {
    std::rethrow_exception(broken_);
  }
}

StateView Tide::acquire(ChunkId chunk, Access /*access*/) {
  const int bucket = chunk.bucket;
  const std::lock_guard lock(mutex_);
  require_whole();
  if (make_room_ && !is_up(bucket)) {
    make_room_(bucket);
  }
  raise(bucket);
  Slot& slot = slots_.at(static_cast<std::size_t>(bucket));
  if (slot.up) {
    parts_.device.wait(Queue::kCompute, slot.up->wait_issued());
  }
  if (slot.down) {
    parts_.device.wait(Queue::kCompute, slot.down->wait_issued());  // It still reads what will be overwritten.
  }
  void* const param =
      at_rest(bucket) == nullptr ? parts_.param_bucket(bucket).data_ptr() : param_in(slot.buffer, bucket);
  slot.leased = true;
  return view_of(parts_.shape, layout(bucket), range(chunk), static_cast<std::byte*>(slot.buffer.data_ptr()), param);
}

void Tide::release(ChunkId chunk, Access /*access*/, TransferPtr /*reader*/) noexcept {
  const int bucket = chunk.bucket;
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[static_cast<std::size_t>(bucket)];
  slot.raised = false;
  slot.leased = false;
  try {
    const EventPtr updated = parts_.device.record(Queue::kCompute);
    if (ParameterShards* const rest = at_rest(bucket); rest != nullptr) {
      // The next forward reads these first; states have time until the peak.
      rest->comes_down(bucket, parts_.down.push_urgent(
                                   {{rest->host_address(bucket), param_in(slot.buffer, bucket), param_nbytes(bucket)}},
                                   {updated}, slot.up, "parameters down", bucket));
    }
    // What was pushed before is done before, so that the buffer is free when this is.
    slot.down =
        parts_.down.push({{first_array(parts_.host.view(bucket)), slot.buffer.data_ptr(), state_nbytes(bucket)}},
                         {updated}, slot.up, "states", bucket);
    std::erase(sent_down_, bucket);
    sent_down_.push_back(bucket);
  } catch (...) {
    broken_ = std::current_exception();
  }
}

void Tide::free(Slot& slot, int bucket) {
  slot.buffer = at::Tensor();
  slot.up = nullptr;
  slot.raised = false;
  live_nbytes_ -= nbytes(bucket);
}

void Tide::shrink_to(std::size_t nbytes, bool wait, bool also_raised) {
  const std::lock_guard lock(mutex_);
  require_whole();
  if (live_nbytes_ <= nbytes) {
    return;
  }
  for (const bool may_wait : {false, true}) {
    if (may_wait && !wait) {
      break;
    }
    std::erase_if(sent_down_, [&](int bucket) {
      Slot& slot = slots_[static_cast<std::size_t>(bucket)];
      if (!slot.buffer.defined() || !slot.down) {
        return true;
      }
      if (live_nbytes_ <= nbytes || slot.raised || (!may_wait && !slot.down->is_done())) {
        return false;
      }
      slot.down->wait_done();
      free(slot, bucket);
      return true;
    });
  }
  // The first buckets are updated last.
  for (std::size_t i = 0; also_raised && i < slots_.size() && live_nbytes_ > nbytes; ++i) {
    if (slots_[i].buffer.defined()) {
      recall(static_cast<int>(i));
    }
  }
}

void Tide::recall(int bucket) {
  const std::lock_guard lock(mutex_);
  require_whole();
  Slot& slot = slots_.at(static_cast<std::size_t>(bucket));
  if (!slot.buffer.defined()) {
    if (slot.down) {
      slot.down->wait_done();
    }
    return;
  }
  if (slot.up) {
    slot.up->wait_done();
  }
  if (slot.down) {
    slot.down->wait_done();
  }
  free(slot, bucket);
}

void Tide::settle() {
  const std::lock_guard lock(mutex_);
  require_whole();
  for (const Slot& slot : slots_) {
    if (slot.down) {
      slot.down->wait_done();
    }
  }
}

}  // namespace pannier
