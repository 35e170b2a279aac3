#include "pannier/tier/nvme_state_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/io/process_files.h"

namespace pannier {
namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

std::vector<FolderLock> take_locks(const NvmeStateOptions& options) {
  std::vector<FolderLock> locks;
  if (options.takes_lock) {
    remove_named_files_on_signals();
    for (const std::string& folder : options.folders) {
      locks.emplace_back(folder);
    }
  }
  return locks;
}

}  // namespace

NvmeStateStore::NvmeStateStore(HostMemory& memory, const StateShape& shape,
                               const std::vector<std::int64_t>& bucket_numels, const NvmeStateOptions& options,
                               std::vector<std::byte*> params)
    : StateStore(bucket_numels, nvme_staging(shape, bucket_numels, options).chunk_numel),
      shape_(shape),
      staging_(nvme_staging(shape, bucket_numels, options)),
      params_(std::move(params)),
      parallel_for_(torch_parallel_for(options.most_threads)),
      first_extent_(bucket_numels.size()),
      locks_(take_locks(options)),
      file_({.folders = options.folders, .nbytes = staging_.file_nbytes, .rank = options.rank}),
      pool_(memory, {.buffer_count = staging_.num_buffers, .buffer_size = staging_.chunk_nbytes},
            torch_parallel_for()) {
  if (staging_.host_chunks > 0) {
    host_ = HostSlab(memory, staging_.host_nbytes(), {.owner = options.owner}, torch_parallel_for());
  }
  ExtentTable table;
  for (int b = num_buckets() - 1; b >= 0; --b) {
    first_extent_[static_cast<std::size_t>(b)] = table.size();
    for (int c = 0; c < num_chunks(b); ++c) {
      const ElementRange elements = range({b, c});
      const bool is_on_disk = !rests_in_memory(table.size());
      chunk_at_.push_back({b, c});
      table.add(options.label ? options.label(b, elements) : fmt::format("bucket {}", b),
                is_on_disk ? nbytes_of(elements.numel(), bytes_per_element(shape_of(b))) : 0);
    }
  }
  slot_of_.assign(table.size(), -1);
  position_of_.assign(table.size(), kNever);
  engine_ = make_io_engine(file_, {.kind = options.engine, .buffers = pool_.regions(), .hook = options.hook});
  extents_ = std::make_unique<ExtentFile>(std::move(table), *engine_);
  for (std::size_t i = 0; i < staging_.num_buffers; ++i) {
    slots_.push_back({.buffer = pool_.acquire(), .transfer = std::nullopt, .reader = nullptr});
  }
}

NvmeStateStore::~NvmeStateStore() {
  for (Slot& slot : slots_) {
    if (slot.reader) {
      slot.reader->wait_ended();
    }
  }
  extents_->wait_ended();
}

std::vector<std::span<std::byte>> NvmeStateStore::regions() {
  std::vector<std::span<std::byte>> regions = pool_.regions();
  if (host_.data().size() > 0) {
    regions.push_back(host_.data());
  }
  return regions;
}

NvmeStats NvmeStateStore::stats() const {
  const IoStats io = engine_->stats();
  return {staging_.file_nbytes, io.read_bytes, io.written_bytes};
}

std::vector<std::string> NvmeStateStore::notes() const {
  std::vector<std::string> notes = file_.notes();
  notes.insert(notes.end(), engine_->notes().begin(), engine_->notes().end());
  return notes;
}

std::size_t NvmeStateStore::extent_of(ChunkId chunk) const {
  return first_extent_[static_cast<std::size_t>(chunk.bucket)] + static_cast<std::size_t>(chunk.chunk);
}

// What the disk has of a bucket's elements.
StateShape NvmeStateStore::shape_of(int bucket) const {
  StateShape shape = shape_;
  shape.param_nbytes = param_of(bucket) == nullptr ? shape_.param_nbytes : 0;
  return shape;
}

StateView NvmeStateStore::view_at(ChunkId chunk, std::byte* states) const {
  const ElementRange elements = range(chunk);
  const HostBucketLayout layout = host_bucket_layout(shape_of(chunk.bucket), elements.numel());
  std::byte* const elsewhere = param_of(chunk.bucket);
  return view_of(
      shape_, layout, elements, states,
      elsewhere == nullptr ? states + layout.offsets[3] : elsewhere + nbytes_of(elements.begin, shape_.param_nbytes));
}

std::optional<StateView> NvmeStateStore::resting(ChunkId chunk) {
  const std::size_t extent = extent_of(chunk);
  std::byte* const at = host_.data().data() + extent * staging_.chunk_nbytes;
  return rests_in_memory(extent) ? std::optional(view_at(chunk, at)) : std::nullopt;
}

NvmeStateStore::Slot* NvmeStateStore::slot_with(std::size_t extent) {
  return slot_of_[extent] < 0 ? nullptr : &slots_[static_cast<std::size_t>(slot_of_[extent])];
}

// In how many leases an extent is expected to be lent.
std::size_t NvmeStateStore::wait_order(std::size_t extent) const {
  const std::size_t position = position_of_[extent];
  return position == kNever || position < next_expected_ ? kNever : position - next_expected_;
}

bool NvmeStateStore::is_later(const Slot& slot, const Slot& other) const {
  const std::size_t in = wait_order(slot.extent);
  const std::size_t other_in = wait_order(other.extent);
  return in != other_in ? in > other_in : slot.lent_at < other.lent_at;
}

void NvmeStateStore::free(Slot& slot) noexcept {
  slot_of_[slot.extent] = -1;
  slot.use = Use::kFree;
  slot.is_unsaved = false;
  slot.is_checked = true;
  slot.sum.reset();
  slot.transfer.reset();
}

// A buffer for what is wanted in so many leases: a free one, or the one of the chunk that is wanted latest; of those
// that nobody is known to want, the one that was lent longest ago.
NvmeStateStore::Slot* NvmeStateStore::try_take_slot(std::size_t wanted_in) {
  Slot* best = nullptr;
  for (Slot& slot : slots_) {
    if (slot.reader && slot.reader->is_done()) {
      slot.reader = nullptr;
    }
    if (slot.reader || (slot.use != Use::kFree && slot.use != Use::kClean)) {
      continue;
    }
    if (slot.use == Use::kFree) {
      return &slot;
    }
    if (wait_order(slot.extent) > wanted_in && (best == nullptr || is_later(slot, *best))) {
      best = &slot;
    }
  }
  if (best != nullptr) {
    free(*best);
  }
  return best;
}

NvmeStateStore::Slot& NvmeStateStore::take_slot() {
  while (true) {
    if (Slot* slot = try_take_slot(0)) {
      return *slot;
    }
    wait_for_any_slot();
    raise_failed();
  }
}

// Waits for what ends first, most likely: the oldest write, else what reads a clean buffer, else a read ahead.
void NvmeStateStore::wait_for_any_slot() {
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (slot.use == Use::kWriting && (oldest == nullptr || slot.lent_at < oldest->lent_at)) {
      oldest = &slot;
    }
  }
  if (oldest != nullptr) {
    finish_write(*oldest);
    return;
  }
  for (const Use use : {Use::kFree, Use::kClean, Use::kReading}) {
    for (Slot& slot : slots_) {
      if (slot.use != use || (use != Use::kReading && !slot.reader)) {
        continue;
      }
      if (slot.reader) {
        std::exchange(slot.reader, nullptr)->wait_ended();
      }
      if (use == Use::kReading) {
        slot.transfer->wait_ended();
        free(slot);
      }
      return;
    }
  }
  PANNIER_CHECK(false, fmt::format("all of {} staging buffers are lent or could not be written", slots_.size()));
}

void NvmeStateStore::begin_read(Slot& slot, std::size_t extent) {
  slot.extent = extent;
  if (extents_->state(extent) == ExtentState::kEmpty) {
    std::memset(slot.buffer.data().data(), 0, slot.buffer.data().size());
    slot.use = Use::kClean;
  } else {
    slot.transfer = extents_->read(extent, slot.buffer.data(), Verify::kByCaller);
    slot.use = Use::kReading;
  }
  slot_of_[extent] = static_cast<int>(&slot - slots_.data());
}

// The caller writes all of it.
void NvmeStateStore::fill_later(Slot& slot, std::size_t extent) {
  slot.extent = extent;
  slot.use = Use::kClean;
  slot_of_[extent] = static_cast<int>(&slot - slots_.data());
}

void NvmeStateStore::finish_read(Slot& slot) {
  try {
    slot.transfer->wait_done();
  } catch (...) {
    // What was read ahead beside it may have failed with it; that is not for a later call to tell.
    for (Slot& other : slots_) {
      if (other.use == Use::kReading) {
        other.transfer->wait_ended();
        free(other);
      }
    }
    throw;
  }
  slot.transfer.reset();
  slot.use = Use::kClean;
  slot.is_checked = false;
}

void NvmeStateStore::begin_write(Slot& slot) {
  slot.use = Use::kDirty;
  slot.is_checked = true;
  const auto confirmed = std::exchange(slot.sum, std::nullopt);
  slot.transfer = extents_->write(slot.extent, slot.buffer.data(), confirmed ? *confirmed : sum_of(slot));
  slot.use = Use::kWriting;
}

void NvmeStateStore::finish_write(Slot& slot) noexcept {
  try {
    slot.transfer->wait_done();
    slot.use = Use::kClean;
  } catch (...) {
    slot.use = Use::kDirty;
    failed_ = failed_ ? failed_ : std::current_exception();
  }
  slot.transfer.reset();
}

void NvmeStateStore::collect() noexcept {
  for (Slot& slot : slots_) {
    if (slot.use == Use::kWriting && slot.transfer->is_done()) {
      finish_write(slot);
    }
  }
}

void NvmeStateStore::raise_failed() {
  if (!failed_) {
    return;
  }
  const std::exception_ptr error = std::exchange(failed_, nullptr);
  for (Slot& slot : slots_) {
    if (slot.use == Use::kDirty) {
      begin_write(slot);
    }
  }
  std::rethrow_exception(error);
}

void NvmeStateStore::check() {
  collect();
  raise_failed();
}

void NvmeStateStore::settle() {
  for (Slot& slot : slots_) {
    if (slot.use == Use::kWriting) {
      finish_write(slot);
    }
  }
  raise_failed();
}

void NvmeStateStore::expect(std::vector<ChunkId> order) {
  position_of_.assign(position_of_.size(), kNever);
  expected_.clear();
  next_expected_ = 0;
  for (const ChunkId chunk : order) {
    position_of_[extent_of(chunk)] = expected_.size();
    expected_.push_back(extent_of(chunk));
  }
  collect();
  read_ahead();
}

void NvmeStateStore::pass(std::size_t extent) noexcept {
  if (wait_order(extent) != kNever) {
    next_expected_ = position_of_[extent] + 1;
  }
}

// What can't be read ahead is told when it is wanted.
void NvmeStateStore::read_ahead() noexcept {
  try {
    read_ahead_while_room();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

// Extents that were never written have nothing to read; those in buffers come from there.
void NvmeStateStore::read_ahead_while_room() {
  for (std::size_t i = next_expected_; i < expected_.size(); ++i) {
    const std::size_t extent = expected_[i];
    if (slot_of_[extent] >= 0 || rests_in_memory(extent) || extents_->state(extent) == ExtentState::kEmpty) {
      continue;
    }
    Slot* const slot = try_take_slot(i - next_expected_);
    if (slot == nullptr) {
      return;
    }
    begin_read(*slot, extent);
  }
}

StateView NvmeStateStore::acquire(ChunkId chunk, Access access) {
  check();
  const std::size_t extent = extent_of(chunk);
  if (rests_in_memory(extent)) {
    pass(extent);
    read_ahead();
    return view_at(chunk, host_.data().data() + extent * staging_.chunk_nbytes);
  }
  Slot* slot = slot_with(extent);
  if (slot == nullptr) {
    slot = &take_slot();
    access == Access::kOverwrite ? fill_later(*slot, extent) : begin_read(*slot, extent);
  }
  if (slot->use == Use::kReading && access == Access::kOverwrite) {
    slot->transfer->wait_ended();
    slot->transfer.reset();
  } else if (slot->use == Use::kReading) {
    finish_read(*slot);
  } else if (slot->use == Use::kWriting) {
    finish_write(*slot);  // One that failed is told of by the next call; its bytes are here.
  }
  if (slot->reader) {
    std::exchange(slot->reader, nullptr)->wait_ended();
  }
  if (access == Access::kOverwrite) {
    slot->is_checked = true;
  } else if (access != Access::kTiles) {
    check(*slot);
  }
  slot->is_unsaved = slot->use == Use::kDirty;
  slot->use = Use::kLent;
  slot->lent_at = num_lent_++;
  pass(extent);
  read_ahead();
  return view_at(chunk, slot->buffer.data().data());
}

void NvmeStateStore::release(ChunkId chunk, Access access, TransferPtr reader) noexcept {
  Slot* const slot = rests_in_memory(extent_of(chunk)) ? nullptr : slot_with(extent_of(chunk));
  try {
    if (slot != nullptr) {
      slot->reader = std::move(reader);
      if (!slot->is_checked) {
        free(*slot);  // Nobody can say what it holds.
      } else if (access != Access::kRead) {
        begin_write(*slot);
      } else {
        slot->use = slot->is_unsaved ? Use::kDirty : Use::kClean;
      }
      slot->is_unsaved = false;
    }
    collect();
    read_ahead();
  } catch (...) {
    failed_ = failed_ ? failed_ : std::current_exception();
  }
}

}  // namespace pannier
