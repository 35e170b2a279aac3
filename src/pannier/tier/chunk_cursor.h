// Reads or changes runs of elements of a shard, whatever chunks its store lends it in.
#pragma once

#include <cstdint>
#include <optional>

#include "pannier/tier/state_store.h"

namespace pannier {

/// Walks elements of one bucket's shard a lease at a time. Holds the last lease until it needs another chunk, so that
/// runs of elements that follow each other share it. Must not outlive the store.
class ChunkCursor {
 public:
  ChunkCursor(StateStore& store, int bucket, Access access) : store_(store), bucket_(bucket), access_(access) {}

  /// Calls `use(view, part)` for each chunk that has elements of `range`, in order: `part` of them.
  template <class Use>
  void visit(const ElementRange& range, Use&& use) {
    for (std::int64_t at = range.begin; at < range.end;) {
      const StateView& view = open(store_.chunk_of(bucket_, at));
      const ElementRange part = common(view.range, {at, range.end});
      use(view, part);
      at = part.end;
    }
  }

  /// Gives the last lease back.
  void close() noexcept { lease_.reset(); }

 private:
  const StateView& open(ChunkId chunk);

  StateStore& store_;
  int bucket_;
  Access access_;
  std::optional<Lease> lease_;
};

}  // namespace pannier
