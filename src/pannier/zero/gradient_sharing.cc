#include "pannier/zero/gradient_sharing.h"

#include <ATen/core/Tensor.h>

#include <deque>
#include <utility>

#include "pannier/base/units.h"
#include "pannier/device/dtype.h"
#include "pannier/tier/gradient_store.h"

namespace pannier {
namespace {

class SoloSharing final : public GradientSharing {
 public:
  explicit SoloSharing(Deliver deliver) : deliver_(std::move(deliver)) {}
  [[nodiscard]] bool in_order() const noexcept override { return false; }
  void take(int bucket, std::vector<FlatGradient> gradients, bool last) override {
    deliver_(bucket, std::move(gradients), last);
  }
  void hold(bool /*holding*/) override {}
  void finish() override {}
  void finish_window() override {}
  [[nodiscard]] std::vector<FlatGradient> held(int /*bucket*/) override { return {}; }
  void forget(int /*parameter*/) override {}
  void drop() override {}

 private:
  Deliver deliver_;
};

class RankSharing final : public GradientSharing {
 public:
  RankSharing(SharingParts parts, bool sums_first, Deliver deliver)
      : parts_(parts), sums_first_(sums_first), deliver_(std::move(deliver)) {
    drop();
  }

  [[nodiscard]] bool in_order() const noexcept override { return true; }

  void take(int bucket, std::vector<FlatGradient> gradients, bool last) override {
    const OwnerScope scope(Owner::kGradients);
    const bool waits = sums_first_ && (!last || holding_);
    if (!waits && !has_sums_) {
      const at::Tensor flat = packed(bucket, gradients, parts_.type);
      gradients.clear();
      share(bucket, flat, last);
      return;
    }
    for (FlatGradient& gradient : gradients) {
      sums_->add(gradient.parameter, std::move(gradient.values), /*last=*/false);
    }
    gradients.clear();
    has_sums_ = true;
    if (!waits) {
      share(bucket, packed(bucket, taken_sums(bucket), at::kFloat), last);
      // The window's last bucket: what comes after it stands alone again.
      has_sums_ = bucket + 1 < parts_.shards.buckets().num_buckets();
    }
  }

  void hold(bool holding) override { holding_ = holding; }

  void finish_window() override {
    const OwnerScope scope(Owner::kGradients);
    for (int b = 0; has_sums_ && b < parts_.shards.buckets().num_buckets(); ++b) {
      share(b, packed(b, taken_sums(b), at::kFloat), /*last=*/true);
    }
    has_sums_ = false;
    finish();
  }

  void finish() override {
    while (!under_way_.empty()) {
      deliver_oldest();
    }
  }

  [[nodiscard]] std::vector<FlatGradient> held(int bucket) override {
    if (!has_sums_) {
      return {};
    }
    finish();
    const OwnerScope scope(Owner::kGradients);
    std::vector<FlatGradient> sums;
    for (const Segment& segment : parts_.shards.buckets().buckets()[static_cast<std::size_t>(bucket)].segments) {
      if (sums_->view(segment.parameter).data != nullptr) {
        sums.push_back({segment.parameter, sums_->read(segment.parameter)});
      }
    }
    const at::Tensor flat = packed(bucket, sums, at::kFloat);
    return added_up(bucket, parts_.exchange.scatter(flat, bucket));
  }

  void forget(int parameter) override { sums_->drop(parameter); }

  void drop() override {
    under_way_.clear();
    has_sums_ = false;
    // Sums are fp32 from the first micro-batch on, so that ranks that had none of a parameter send the same type.
    sums_ = make_device_gradients(parts_.device, parts_.shards.buckets().num_parameters(),
                                  {grad_type_of(parts_.type), true, false});
  }

 private:
  struct UnderWay {
    int bucket;
    bool last;
    ShardExchange::Scattered scattered;
  };
  static constexpr std::size_t kMostUnderWay = 2;

  void share(int bucket, const at::Tensor& flat, bool last) {
    while (under_way_.size() >= kMostUnderWay) {
      deliver_oldest();
    }
    under_way_.push_back({bucket, last, parts_.exchange.scatter(flat, bucket)});
  }

  // A bucket's gradients in one tensor, zero where there is none.
  at::Tensor packed(int bucket, const std::vector<FlatGradient>& gradients, at::ScalarType type) {
    const Bucket& layout = parts_.shards.buckets().buckets()[static_cast<std::size_t>(bucket)];
    at::Tensor flat = parts_.device.allocate(layout.numel, type, Owner::kGradients);
    const auto width = static_cast<std::size_t>(flat.element_size());
    std::int64_t given = 0;
    for (const FlatGradient& gradient : gradients) {
      given += gradient.values.numel();
    }
    if (given < layout.numel) {  // Padding is sent too; it must not be what somebody left in memory.
      parts_.device.fill_zero(flat.data_ptr(), flat.nbytes());
    }
    for (const FlatGradient& gradient : gradients) {
      const Segment& segment = parts_.shards.buckets().segment_of(gradient.parameter);
      parts_.device.copy_on_device(static_cast<char*>(flat.data_ptr()) + nbytes_of(segment.offset, width),
                                   gradient.values.data_ptr(), gradient.values.nbytes());
    }
    return flat;
  }

  std::vector<FlatGradient> taken_sums(int bucket) {
    std::vector<FlatGradient> sums;
    for (const Segment& segment : parts_.shards.buckets().buckets()[static_cast<std::size_t>(bucket)].segments) {
      if (sums_->view(segment.parameter).data != nullptr) {
        sums.push_back({segment.parameter, sums_->read(segment.parameter)});
        sums_->drop(segment.parameter);
      }
    }
    return sums;
  }

  void deliver_oldest() {
    const OwnerScope scope(Owner::kGradients);
    const UnderWay oldest = std::move(under_way_.front());
    under_way_.pop_front();
    deliver_(oldest.bucket, added_up(oldest.bucket, oldest.scattered), oldest.last);
  }

  // What all ranks sent of this rank's pieces, added up in rank order.
  std::vector<FlatGradient> added_up(int bucket, const ShardExchange::Scattered& scattered) {
    scattered.pending->wait();
    std::vector<FlatGradient> sums;
    for (const ShardPiece& piece : parts_.shards.pieces(bucket)) {
      at::Tensor sum = parts_.device.allocate(piece.numel, at::kFloat, Owner::kGradients);
      bool first = true;
      for (const at::Tensor& part : scattered.parts) {
        const auto* from = static_cast<const char*>(part.data_ptr()) +
                           nbytes_of(piece.shard_offset, static_cast<std::size_t>(part.element_size()));
        parts_.device.compute().accumulate(sum.data_ptr<float>(), from, grad_type_of(part.scalar_type()), piece.numel,
                                           std::exchange(first, false));
      }
      sums.push_back({piece.parameter, std::move(sum)});
    }
    return sums;
  }

  SharingParts parts_;
  bool sums_first_;
  Deliver deliver_;
  bool holding_ = false;
  bool has_sums_ = false;  ///< Micro-batches of this window wait, or some of its buckets still do.
  std::deque<UnderWay> under_way_;
  std::unique_ptr<GradientStore> sums_;
};

}  // namespace

std::unique_ptr<GradientSharing> make_solo_sharing(GradientSharing::Deliver deliver) {
  return std::make_unique<SoloSharing>(std::move(deliver));
}

std::unique_ptr<GradientSharing> make_rank_sharing(SharingParts parts, bool sums_first,
                                                   GradientSharing::Deliver deliver) {
  return std::make_unique<RankSharing>(parts, sums_first, std::move(deliver));
}

}  // namespace pannier
