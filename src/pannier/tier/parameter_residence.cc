#include "pannier/tier/parameter_residence.h"

namespace pannier {
namespace {

class WholeResidence final : public ParameterResidence {
 public:
  WholeResidence(const ShardLayout& shards, ParameterBuckets& parameters) : shards_(shards), parameters_(parameters) {}

  [[nodiscard]] bool rests_whole(int /*bucket*/) const override { return true; }
  [[nodiscard]] at::Tensor own(int bucket) override {
    const Shard& shard = shards_.shard(bucket);
    return parameters_.bucket(bucket).narrow(0, shard.begin, shard.numel());
  }
  void put_back(int /*bucket*/) override {}
  void settle(int /*bucket*/) override {}
  [[nodiscard]] std::byte* host_address(int /*bucket*/) override { return nullptr; }
  void make_whole(int /*bucket*/) override {}
  void keep(int /*bucket*/) override {}
  void let_rest(int /*bucket*/) override {}
  [[nodiscard]] std::vector<int> take_edited() override { return {}; }

 private:
  const ShardLayout& shards_;
  ParameterBuckets& parameters_;
};

}  // namespace

std::unique_ptr<ParameterResidence> make_whole_residence(const ShardLayout& shards, ParameterBuckets& parameters) {
  return std::make_unique<WholeResidence>(shards, parameters);
}

}  // namespace pannier
