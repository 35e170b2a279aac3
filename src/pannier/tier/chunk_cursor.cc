#include "pannier/tier/chunk_cursor.h"

namespace pannier {

const StateView& ChunkCursor::open(ChunkId chunk) {
  if (!lease_ || !(lease_->chunk() == chunk)) {
    lease_.reset();
    lease_.emplace(store_.lease(chunk, access_));
  }
  return lease_->view();
}

}  // namespace pannier
