#include "cli/disk_update.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "pannier/base/units.h"
#include "pannier/device/compute.h"
#include "pannier/optim/tiled_update.h"

namespace pannier::cli {
namespace {

constexpr StateShape kExactBf16{.param_nbytes = 2, .rest_nbytes = 2, .num_states = 2};
constexpr std::int64_t kBucketNumel = std::int64_t{16} << 20;

std::vector<std::int64_t> numels_of(std::size_t nbytes) {
  std::vector<std::int64_t> numels;
  for (auto left = static_cast<std::int64_t>(nbytes / bytes_per_element(kExactBf16)); left > 0; left -= kBucketNumel) {
    numels.push_back(std::min(left, kBucketNumel));
  }
  return numels;
}

// Numbers of either sign that are far from the end of their range.
void fill(std::span<std::byte> gradients) {
  std::minstd_rand random(1);
  auto* const values = reinterpret_cast<std::uint16_t*>(gradients.data());
  for (std::size_t i = 0; i < gradients.size() / 2; ++i) {
    values[i] = static_cast<std::uint16_t>((random() & 0x80FFU) | 0x3C00U);
  }
}

}  // namespace

DiskUpdate::DiskUpdate(const std::string& folder, std::size_t nbytes, int most_threads)
    : numels_(numels_of(nbytes)),
      store_(memory_, kExactBf16, numels_,
             {.folders = {folder}, .buffer_nbytes = std::size_t{20} << 20, .most_threads = most_threads}),
      gradients_(memory_, nbytes_of(static_cast<std::int64_t>(numels_.size()) * kBucketNumel, 2), {.owner = "bench"},
                 torch_parallel_for()),
      most_threads_(most_threads) {
  fill(gradients_.data());
  for (int b = store_.num_buckets() - 1; b >= 0; --b) {
    for (int c = 0; c < store_.num_chunks(b); ++c) {
      chunks_.push_back({b, c});
    }
  }
  sums_.resize(chunks_.size());
}

double DiskUpdate::moved_nbytes() const {
  const NvmeStats stats = store_.stats();
  return static_cast<double>(stats.read_nbytes + stats.written_nbytes);
}

double DiskUpdate::pass(bool updates) {
  const auto begin = std::chrono::steady_clock::now();
  const auto coefficients = kernels::make_coefficients(kernels::Algorithm::kAdamW, {}, ++step_, 1.0F);
  std::vector<std::size_t> order(chunks_.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = goes_back_ ? order.size() - 1 - i : i;
  }
  goes_back_ = !goes_back_;
  std::vector<ChunkId> expected;
  for (const std::size_t i : order) {
    expected.push_back(chunks_[i]);
  }
  store_.expect(std::move(expected));
  for (const std::size_t i : order) {
    const Lease lease = store_.lease(chunks_[i], Access::kTiles);
    const StateView& view = lease.view();
    if (!updates) {
      store_.confirm(chunks_[i], sums_[i], sums_[i]);
      continue;
    }
    const std::int64_t at = chunks_[i].bucket * kBucketNumel + view.range.begin;
    const kernels::UpdateBuffers buffers{.param = view.param,
                                         .rest = view.rest,
                                         .state1 = view.state1,
                                         .state2 = view.state2,
                                         .grad = gradients_.data().data() + nbytes_of(at, 2),
                                         .grad_type = kernels::GradType::kBf16,
                                         .numel = view.range.numel()};
    sums_[i] = update_in_tiles(store_, lease, {{coefficients, buffers}}, 1.0F,
                               {kernels::Algorithm::kAdamW, kernels::StateFormat::kBf16, most_threads_});
  }
  store_.settle();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace pannier::cli
