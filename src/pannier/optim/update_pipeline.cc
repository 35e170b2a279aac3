#include "pannier/optim/update_pipeline.h"

#include <fmt/format.h>

#include <algorithm>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/device/dtype.h"
#include "pannier/optim/tiled_update.h"

namespace pannier {
namespace {

void* at_element(void* base, std::int64_t offset, std::size_t width) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + nbytes_of(offset, width);
}

ElementRange range_of(const ShardPiece& piece) { return {piece.shard_offset, piece.shard_offset + piece.numel}; }

}  // namespace

// Of the piece's `elements`, which lie in the view.
kernels::UpdateTask UpdatePipeline::task_of(const ShardPiece& piece, const StateView& view,
                                            const ElementRange& elements,
                                            const kernels::UpdateCoefficients& constants) {
  const GradientView gradient = parts_.gradients.view(piece.parameter);
  PANNIER_CHECK(gradient.data != nullptr, fmt::format("no gradient for parameter {}", piece.parameter));
  const auto shape = state_shape_of(parts_.format, static_cast<int>(parts_.state_names.size()));
  const std::int64_t offset = elements.begin - view.range.begin;
  const std::size_t gradient_width = gradient.type == kernels::GradType::kFp32 ? 4 : 2;
  return {constants,
          {.param = at_element(view.param, offset, shape.param_nbytes),
           .rest = at_element(view.rest, offset, shape.rest_nbytes),
           .state1 = static_cast<float*>(at_element(view.state1, offset, 4)),
           .state2 = static_cast<float*>(at_element(view.state2, offset, 4)),
           .grad = at_element(gradient.data, elements.begin - piece.shard_offset, gradient_width),
           .grad_type = gradient.type,
           .numel = elements.numel()}};
}

std::vector<ChunkId> UpdatePipeline::updated_chunks(int bucket, const Coefficients& coefficients) const {
  const StateStore& states = *parts_.routes.update_way(bucket).states;
  std::vector<ChunkId> chunks;
  for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
    if (!coefficients.at(static_cast<std::size_t>(piece.parameter))) {
      continue;
    }
    const ElementRange range = range_of(piece);
    const ChunkId last = states.chunk_of(bucket, range.end - 1);
    for (ChunkId chunk = states.chunk_of(bucket, range.begin); chunk.chunk <= last.chunk; ++chunk.chunk) {
      if (chunks.empty() || !(chunks.back() == chunk)) {
        chunks.push_back(chunk);
      }
    }
  }
  return chunks;
}

UpdatePipeline::Prepared UpdatePipeline::prepare_chunk(ChunkId chunk, const Coefficients& coefficients, Access access) {
  const int bucket = chunk.bucket;
  const Way& way = parts_.routes.update_way(bucket);
  parts_.residence.settle(bucket);
  Prepared prepared{way.states->lease(chunk, access), {.bucket = bucket, .tasks = {}, .parameter = {}, .later = {}}};
  const StateView& view = prepared.lease.view();
  for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
    const auto& constants = coefficients.at(static_cast<std::size_t>(piece.parameter));
    const ElementRange elements = common(range_of(piece), view.range);
    if (constants && elements.numel() > 0) {
      prepared.update.tasks.push_back(task_of(piece, view, elements, *constants));
    }
  }
  prepared.update.parameter = way.path->way_to_model(bucket, view);
  return prepared;
}

std::optional<UpdatePipeline::Prepared> UpdatePipeline::prepare(int bucket, const Coefficients& coefficients) {
  const std::vector<ChunkId> chunks = updated_chunks(bucket, coefficients);
  PANNIER_CHECK(chunks.size() <= 1,
                fmt::format("bucket {} was to be prepared as one of {} chunks", bucket, chunks.size()));
  return chunks.empty() ? std::nullopt : std::optional(prepare_chunk(chunks.front(), coefficients));
}

std::vector<BucketUpdate> UpdatePipeline::prepare_chunks(int bucket, const Coefficients& coefficients) {
  const Way& way = parts_.routes.update_way(bucket);
  parts_.residence.settle(bucket);
  std::vector<BucketUpdate> updates;
  for (const ChunkId chunk : updated_chunks(bucket, coefficients)) {
    const StateView nowhere{.range = way.states->range(chunk)};
    LentLater later{.store = way.states,
                    .chunk = chunk,
                    .shape = state_shape_of(parts_.format, static_cast<int>(parts_.state_names.size())),
                    .offsets = {}};
    BucketUpdate update{.bucket = bucket, .tasks = {}, .parameter = {}, .later = {}, .is_last = false};
    for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
      const auto& constants = coefficients.at(static_cast<std::size_t>(piece.parameter));
      const ElementRange elements = common(range_of(piece), nowhere.range);
      if (constants && elements.numel() > 0) {
        update.tasks.push_back(task_of(piece, nowhere, elements, *constants));
        later.offsets.push_back(elements.begin - nowhere.range.begin);
      }
    }
    update.parameter = way.path->way_to_model(bucket, nowhere);
    update.later = std::move(later);
    updates.push_back(std::move(update));
  }
  if (!updates.empty()) {
    updates.back().is_last = true;
  }
  return updates;
}

std::int64_t UpdatePipeline::update_chunk(ChunkId chunk, const Coefficients& coefficients,
                                          const kernels::UpdateControl& control) {
  const Way& way = parts_.routes.update_way(chunk.bucket);
  UpdatePath& path = *way.path;
  const bool is_checked = way.states->tile_numel() > 0;
  Prepared prepared = prepare_chunk(chunk, coefficients, is_checked ? Access::kTiles : Access::kUpdate);
  if (is_checked) {
    update_in_tiles(*way.states, prepared.lease, prepared.update.tasks, *control.grad_factor,
                    {parts_.algorithm, parts_.format, path.most_threads()});
  } else {
    path.compute().update(parts_.algorithm, parts_.format, prepared.update.tasks, control);
  }
  prepared.lease.is_read_by(path.publish(prepared.update.parameter));
  return prepared.update.numel();
}

void UpdatePipeline::end_bucket(int bucket, const Coefficients& coefficients) {
  if (parts_.residence.lends_copies(bucket)) {
    parts_.routes.update_way(bucket).path->finish();  // What it puts back is on its way there.
  }
  parts_.residence.put_back(bucket);
  drop_gradients(bucket, coefficients);
}

std::int64_t UpdatePipeline::update_bucket(int bucket, const Coefficients& coefficients,
                                           const kernels::UpdateControl& control) {
  std::int64_t numel = 0;
  for (const ChunkId chunk : updated_chunks(bucket, coefficients)) {
    numel += update_chunk(chunk, coefficients, control);
  }
  if (numel > 0) {
    end_bucket(bucket, coefficients);
  }
  return numel;
}

void UpdatePipeline::drop_gradients(int bucket, const Coefficients& coefficients) {
  for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
    if (coefficients[static_cast<std::size_t>(piece.parameter)]) {
      parts_.gradients.drop(piece.parameter);
    }
  }
}

// After an IoError it goes on from the first chunk of the bucket that was not updated.
void UpdatePipeline::update_chunks(DeviceUpdates& updates) {
  const std::vector<ChunkId> chunks = updated_chunks(updates.next, updates.coefficients);
  for (; updates.num_chunks < chunks.size(); ++updates.num_chunks) {
    update_chunk(chunks[updates.num_chunks], updates.coefficients, updates.control);
    updates.has_begun = true;
  }
  updates.is_ending = updates.num_chunks > 0;
  updates.num_chunks = 0;
}

// A store on a disk reads ahead.
void UpdatePipeline::expect(DeviceUpdates& updates) {
  StateStore* disk = nullptr;
  std::vector<ChunkId> order;
  for (int b = updates.next; b >= 0 && !updates.is_expected; --b) {
    StateStore* const states = parts_.routes.update_way(b).states;
    if (parts_.routes.route(b) != UpdateRoute::kHost && states->home() == Home::kNvme) {
      const std::vector<ChunkId> chunks = updated_chunks(b, updates.coefficients);
      order.insert(order.end(), chunks.begin(), chunks.end());
      disk = states;
    }
  }
  updates.is_expected = true;
  if (disk != nullptr) {
    disk->expect(std::move(order));
  }
}

// Buckets are in backward order; the next forward needs the last one first.
void UpdatePipeline::issue(DeviceUpdates& updates, bool wait) {
  if (wait) {
    expect(updates);
  }
  for (; updates.next >= 0; --updates.next) {
    const int b = updates.next;
    if (parts_.routes.route(b) == UpdateRoute::kHost) {
      continue;
    }
    if (!updates.is_ending) {
      if (!wait && !parts_.routes.update_way(b).states->is_ready(b)) {
        return;
      }
      const auto span = parts_.device.trace().queued(Queue::kCompute, {.what = "update", .index = b});
      update_chunks(updates);
    }
    if (updates.is_ending) {
      end_bucket(b, updates.coefficients);
      updates.is_ending = false;
    }
  }
}

UpdatePipeline::HostUpdates UpdatePipeline::host_updates(const Coefficients& coefficients) {
  HostUpdates updates;
  for (int b = num_buckets() - 1; b >= 0; --b) {
    if (parts_.routes.route(b) == UpdateRoute::kHost) {
      const std::vector<ChunkId> chunks = updated_chunks(b, coefficients);
      updates.chunks.insert(updates.chunks.end(), chunks.begin(), chunks.end());
    }
  }
  // All is in place before the next forward, so that its order does not count.
  if (!updates.chunks.empty() && parts_.routes.update_way(updates.chunks.front().bucket).states->keeps_last()) {
    goes_back_ = !goes_back_;
    if (goes_back_) {
      std::reverse(updates.chunks.begin(), updates.chunks.end());
    }
  }
  return updates;
}

// Where all of a bucket will be updated, what rests of it need not be read first.
void UpdatePipeline::begin_bucket(const HostUpdates& updates) {
  const ChunkId first = updates.chunks[updates.num_done];
  const auto of_same = [bucket = first.bucket](const ChunkId& chunk) { return chunk.bucket == bucket; };
  const bool is_first = updates.num_done == 0 || !of_same(updates.chunks[updates.num_done - 1]);
  if (is_first && std::count_if(updates.chunks.begin(), updates.chunks.end(), of_same) ==
                      parts_.routes.update_way(first.bucket).states->num_chunks(first.bucket)) {
    parts_.residence.overwrite(first.bucket);
  }
}

std::int64_t UpdatePipeline::update_on_host(HostUpdates& updates, DeviceUpdates& on_device, float grad_factor) {
  std::int64_t numel = 0;
  const std::uint32_t skip = 0;
  const auto& chunks = updates.chunks;
  if (updates.num_done < chunks.size()) {
    parts_.routes.update_way(chunks.back().bucket)
        .states->expect({chunks.begin() + static_cast<std::ptrdiff_t>(updates.num_done), chunks.end()});
  }
  while (updates.num_done < chunks.size() || updates.ending >= 0) {
    if (updates.ending >= 0) {
      end_bucket(updates.ending, on_device.coefficients);
      updates.ending = -1;
      issue(on_device, /*wait=*/false);
      continue;
    }
    begin_bucket(updates);
    const ChunkId chunk = chunks[updates.num_done];
    const auto span = parts_.device.trace().host(TraceRow::kHostUpdates, {.what = "update", .index = chunk.bucket});
    numel += update_chunk(chunk, on_device.coefficients, {&grad_factor, &skip});
    ++updates.num_done;
    if (updates.num_done == chunks.size() || chunks[updates.num_done].bucket != chunk.bucket) {
      updates.ending = chunk.bucket;
    }
  }
  return numel;
}

void UpdatePipeline::publish(const Coefficients& coefficients) {
  for (int b = 0; b < num_buckets(); ++b) {
    parts_.routes.update_way(b).path->finish();
  }
  gather_resting_whole();
  for (std::size_t i = 0; i < coefficients.size(); ++i) {
    if (coefficients[i]) {
      parts_.parameters.bump_version(static_cast<int>(i));
    }
  }
}

void UpdatePipeline::publish_loaded() {
  const c10::NoGradGuard no_grad;
  gather_resting_whole();
  for (int i = 0; i < parts_.shards.buckets().num_parameters(); ++i) {
    if (parts_.parameters.has_memory(bucket_of(i))) {
      parts_.parameters.bump_version(i);
    }
  }
}

void UpdatePipeline::gather_resting_whole() {
  std::vector<std::unique_ptr<PendingExchange>> pending;
  for (int b = num_buckets() - 1; b >= 0; --b) {
    if (parts_.residence.rests_whole(b)) {
      pending.push_back(parts_.exchange.gather(parts_.parameters.bucket(b), b));
    }
  }
  for (const auto& exchange : pending) {
    exchange->wait();
  }
}

void UpdatePipeline::set_route(int bucket, UpdateRoute route) {
  const UpdateRoute before = parts_.routes.route(bucket);
  if (before == route) {
    return;
  }
  PANNIER_CHECK(before != UpdateRoute::kDevice && route != UpdateRoute::kDevice,
                fmt::format("bucket {} can't move from route {} to {}", bucket, to_string(before), to_string(route)));
  parts_.routes.set(bucket, route);
  if (route == UpdateRoute::kHost) {
    // The host's copy of the parameter has not followed the updates on the device.
    const Way& way = parts_.routes.rest_way(bucket);
    parts_.residence.settle(bucket);
    ChunkCursor states(*way.states, bucket, Access::kUpdate);
    states.visit({0, parts_.shards.shard(bucket).numel()},
                 [&](const StateView& view, const ElementRange& part) { way.path->fetch(bucket, view, part); });
    if (parts_.residence.lends_copies(bucket)) {
      parts_.residence.put_back(bucket);
    }
  }
}

}  // namespace pannier
