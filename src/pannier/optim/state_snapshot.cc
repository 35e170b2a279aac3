#include "pannier/optim/state_snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/kernels/convert.h"

namespace pannier {
namespace {

constexpr std::int64_t kRunNumel = std::int64_t{64} << 10;  // As much as stays in a core's cache.
constexpr std::size_t kRoomNbytes = 3 * kRunNumel * sizeof(float) + 2 * kRunNumel * sizeof(std::uint16_t);

template <class T>
T* after(T* address, std::int64_t elements, std::size_t width) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(address) + nbytes_of(elements, width));
}

ElementRange range_of(const ShardPiece& piece) { return {piece.shard_offset, piece.shard_offset + piece.numel}; }

std::size_t chunk_nbytes(const NvmeStateStore* nvme) { return nvme == nullptr ? 0 : nvme->staging().chunk_nbytes; }

}  // namespace

std::size_t StateSnapshot::nbytes(std::size_t chunk_nbytes) { return 2 * chunk_nbytes + kRoomNbytes; }

StateSnapshot::StateSnapshot(UpdatePipelineParts& parts, HostMemory& memory, const StateSnapshotOptions& options)
    : parts_(parts),
      nvme_(options.nvme),
      delay_(options.delay_seed),
      memory_(memory, nbytes(chunk_nbytes(options.nvme)), {.owner = "checkpoint"}),
      ready_(parts.device.record(Queue::kCompute)) {
  auto rest = memory_.data();
  const auto take = [&rest](std::size_t nbytes) {
    const auto taken = rest.first(nbytes);
    rest = rest.subspan(nbytes);
    return taken;
  };
  for (Apart& apart : apart_) {
    apart.memory = take(chunk_nbytes(nvme_));
  }
  for (auto& room : room_) {
    room = {reinterpret_cast<float*>(take(kRunNumel * sizeof(float)).data()), kRunNumel};
  }
  for (auto& half : halves_) {
    half = {reinterpret_cast<std::uint16_t*>(take(kRunNumel * sizeof(std::uint16_t)).data()), kRunNumel};
  }
  const int num_buckets = parts_.shards.buckets().num_buckets();
  first_source_.assign(static_cast<std::size_t>(num_buckets), -1);
  for (int b = num_buckets - 1; b >= 0; --b) {  // What the next forward needs first is updated first.
    if (!parts_.shards.pieces(b).empty()) {
      add_bucket(b);
    }
  }
}

StateSnapshot::~StateSnapshot() {
  end();
  for (StateStore* store : watched_) {
    store->before_update(nullptr);
  }
}

void StateSnapshot::add_bucket(int bucket) {
  parts_.residence.settle(bucket);
  const UpdateRoutes::Way& way = parts_.routes.rest_way(bucket);
  const std::size_t width = parts_.format == kernels::StateFormat::kFp32 ? 4 : 2;
  const std::byte* const at_rest = parts_.residence.host_address(bucket);
  const bool is_on_device = at_rest == nullptr && parts_.routes.route(bucket) != UpdateRoute::kHost;
  const std::byte* base = at_rest;
  if (is_on_device) {
    kept_.push_back(parts_.residence.own(bucket));
    base = static_cast<const std::byte*>(kept_.back().data_ptr());
  }
  first_source_[static_cast<std::size_t>(bucket)] = static_cast<std::int64_t>(sources_.size());
  for (int c = 0; c < way.states->num_chunks(bucket); ++c) {
    const ElementRange range = way.states->range({bucket, c});
    Source source{.chunk = {bucket, c},
                  .states = way.states->resting({bucket, c}),
                  .param = base == nullptr ? nullptr : base + nbytes_of(range.begin, width),
                  .is_param_on_device = is_on_device,
                  .way = &way};
    const bool reads_param = parts_.format != kernels::StateFormat::kFp16;
    for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
      if (is_on_device && reads_param && parts_.residence.rests_whole(bucket) &&
          common(range_of(piece), range).numel() > 0) {
        source.versions.emplace_back(piece.parameter, parts_.parameters.parameter(piece.parameter)._version());
      }
    }
    sources_.push_back(std::move(source));
  }
  watch(*way.states);
  watch(*parts_.routes.update_way(bucket).states);
}

void StateSnapshot::watch(StateStore& store) {
  if (std::find(watched_.begin(), watched_.end(), &store) != watched_.end()) {
    return;
  }
  watched_.push_back(&store);
  const bool lends = &store == nvme_;
  store.before_update(
      [this, lends](ChunkId chunk, const StateView& view) { hold_back(chunk, lends ? &view : nullptr); });
}

std::vector<ShardPiece> StateSnapshot::pieces() const {
  std::vector<ShardPiece> all;
  for (int b = parts_.shards.buckets().num_buckets() - 1; b >= 0; --b) {
    const auto& pieces = parts_.shards.pieces(b);
    all.insert(all.end(), pieces.begin(), pieces.end());
  }
  return all;
}

void StateSnapshot::wait_until_read(std::unique_lock<std::mutex>& lock, std::size_t num_read) noexcept {
  const auto begin = std::chrono::steady_clock::now();
  progress_changed_.notify_all();
  progress_changed_.wait(lock, [&] { return has_ended_ || num_read_ >= num_read; });
  waited_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void StateSnapshot::hold_back(ChunkId chunk, const StateView* lent) noexcept {
  const std::int64_t first = first_source_[static_cast<std::size_t>(chunk.bucket)];
  if (first < 0) {
    return;
  }
  const auto source = static_cast<std::size_t>(first + chunk.chunk);
  std::unique_lock lock(progress_mutex_);
  if (has_ended_ || num_read_ > source) {
    return;
  }
  wanted_ = source;
  lent_ = lent == nullptr ? std::nullopt : std::optional(*lent);
  wait_until_read(lock, source + 1);
  wanted_.reset();
  lent_.reset();
}

void StateSnapshot::wait_read() noexcept {
  std::unique_lock lock(progress_mutex_);
  if (!has_ended_ && num_read_ < sources_.size()) {
    wanted_ = sources_.size();
    wait_until_read(lock, sources_.size());
    wanted_.reset();
  }
}

void StateSnapshot::begin_updates() noexcept {
  const std::lock_guard lock(progress_mutex_);
  is_updating_ = true;
}

void StateSnapshot::end_updates() noexcept {
  {
    const std::lock_guard lock(progress_mutex_);
    is_updating_ = false;
  }
  progress_changed_.notify_all();
}

double StateSnapshot::waited_s() const {
  const std::lock_guard lock(progress_mutex_);
  return waited_s_;
}

void StateSnapshot::end() noexcept {
  for (Apart& apart : apart_) {
    if (apart.transfer) {
      apart.transfer->wait_ended();
      apart.transfer.reset();
    }
  }
  {
    const std::lock_guard lock(progress_mutex_);
    has_ended_ = true;
  }
  progress_changed_.notify_all();
}

void StateSnapshot::visit(const std::function<void(const SnapshotRun&)>& use) {
  parts_.device.attach_thread();
  ready_->wait();
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    delay_();
    const StateView view = states_of(i);
    visit_source(sources_[i], view, use);
    require_unchanged(sources_[i]);
    {
      const std::lock_guard lock(progress_mutex_);
      num_read_ = i + 1;
    }
    progress_changed_.notify_all();
  }
}

void StateSnapshot::begin_read(std::size_t source) {
  Apart& apart = apart_.at(source % apart_.size());
  apart.transfer = nvme_->read_apart(sources_[source].chunk, apart.memory);
}

// While updates run, what they read is not read twice: it will be lent, unless they come to a later chunk first.
StateView StateSnapshot::states_of(std::size_t source) {
  if (sources_[source].states) {
    return *sources_[source].states;
  }
  Apart& apart = apart_.at(source % apart_.size());
  if (!apart.transfer) {
    std::unique_lock lock(progress_mutex_);
    progress_changed_.wait(lock, [this] { return wanted_.has_value() || !is_updating_; });
    if (wanted_ == source && lent_) {
      return *lent_;
    }
    lock.unlock();
    begin_read(source);
  }
  const bool reads_ahead = source + 1 < sources_.size() && !sources_[source + 1].states;
  if (std::unique_lock lock(progress_mutex_); reads_ahead && !is_updating_) {
    lock.unlock();
    begin_read(source + 1);
  }
  apart.transfer->wait_done();
  apart.transfer.reset();
  nvme_->verify_apart(sources_[source].chunk, apart.memory.data());
  return nvme_->view_apart(sources_[source].chunk, apart.memory.data());
}

void StateSnapshot::visit_source(const Source& source, const StateView& view,
                                 const std::function<void(const SnapshotRun&)>& use) {
  for (const ShardPiece& piece : parts_.shards.pieces(source.chunk.bucket)) {
    const ElementRange part = common(range_of(piece), view.range);
    for (std::int64_t at = part.begin; at < part.end; at += kRunNumel) {
      use(read_run(source, view, piece, {at, std::min(part.end, at + kRunNumel)}));
    }
  }
}

const float* StateSnapshot::as_host(const void* from, bool is_on_device, std::span<float> room, std::int64_t numel) {
  if (!is_on_device || parts_.device.torch_device().is_cpu()) {
    return static_cast<const float*>(from);
  }
  parts_.device.copy_down(room.data(), from, nbytes_of(numel, sizeof(float)));
  return room.data();
}

SnapshotRun StateSnapshot::read_run(const Source& source, const StateView& view, const ShardPiece& piece,
                                    const ElementRange& elements) {
  const std::int64_t at = elements.begin - view.range.begin;
  const std::int64_t n = elements.numel();
  const auto numel = static_cast<std::size_t>(n);
  const bool on_device = source.way->states->home() == Home::kDevice;
  const auto* const param = source.param != nullptr ? source.param : static_cast<const std::byte*>(view.param);
  const auto param_at = [&](std::size_t width) { return param + nbytes_of(at, width); };
  SnapshotRun run{.parameter = piece.parameter, .master = {}, .states = {}};
  switch (parts_.format) {
    case kernels::StateFormat::kFp32:
      run.master = {as_host(param_at(4), source.is_param_on_device, room_[0], n), numel};
      break;
    case kernels::StateFormat::kFp16:
      run.master = {as_host(after(view.rest, at, 4), on_device, room_[0], n), numel};
      break;
    case kernels::StateFormat::kBf16: {
      const void* high = param_at(2);
      const void* low = after(view.rest, at, 2);
      if (!parts_.device.torch_device().is_cpu()) {
        const auto fetch = [&](const void*& from, bool is_there, std::span<std::uint16_t> to) {
          if (is_there) {
            parts_.device.copy_down(to.data(), from, nbytes_of(n, 2));
            from = to.data();
          }
        };
        fetch(high, source.is_param_on_device, halves_[0]);
        fetch(low, on_device, halves_[1]);
      }
      kernels::join_master(static_cast<const std::uint16_t*>(high), static_cast<const std::int16_t*>(low),
                           room_[0].data(), n, serial_for);
      run.master = {room_[0].data(), numel};
      break;
    }
  }
  const std::array<const float*, 2> states{view.state1, view.state2};
  for (std::size_t i = 0; i < parts_.state_names.size(); ++i) {
    run.states.at(i) = {as_host(states.at(i) + at, on_device, room_.at(i + 1), n), numel};
  }
  return run;
}

// Where the model's own memory is read, whoever writes into it is seen by torch's count of versions.
void StateSnapshot::require_unchanged(const Source& source) const {
  for (const auto& [parameter, version] : source.versions) {
    if (parts_.parameters.parameter(parameter)._version() != version) {
      throw ConfigError(
          fmt::format("parameter {} was written into while a checkpoint was being written (\"checkpoint\": "
                      "{{\"async\": true}}), so "
                      "there is none of that save; call engine.finish_checkpoint() before you change parameters",
                      parts_.parameters.name(parameter)));
    }
  }
}

}  // namespace pannier
