// Runs the update over this rank's shards of all buckets in forward order (the parameters that the next forward needs
// first come first): state in, update, parameter out. Also the one place that knows how a master weight is made of what
// is stored.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pannier/comm/shard_exchange.h"
#include "pannier/kernels/update.h"
#include "pannier/layout/shard_layout.h"
#include "pannier/optim/update_routes.h"
#include "pannier/tier/chunk_cursor.h"
#include "pannier/tier/gradient_store.h"
#include "pannier/tier/parameter_buckets.h"
#include "pannier/tier/parameter_residence.h"
#include "pannier/tier/state_store.h"

namespace pannier {

/// What the pipeline works on. Everything must outlive it.
struct UpdatePipelineParts {
  Device& device;
  const ShardLayout& shards;  ///< Of parameters that are trained.
  Communicator& communicator;
  ShardExchange& exchange;
  ParameterBuckets& parameters;
  ParameterResidence& residence;
  GradientStore& gradients;
  UpdateRoutes& routes;
  kernels::Algorithm algorithm;
  kernels::StateFormat format;
  std::vector<std::string> state_names;  ///< Of state1 and state2, as torch names them.
  double initial_state1 = 0.0;           ///< Adagrad's initial accumulator value.
};

/// Owns nothing but the order of work. One thread.
class UpdatePipeline {
 public:
  /// The arrays of a state, as ranks number them when they exchange one.
  enum class Array : std::uint8_t { kRest = 0, kState1 = 1, kState2 = 2 };

  explicit UpdatePipeline(UpdatePipelineParts parts) : parts_(std::move(parts)) {}

  /// Moves the model's parameters into the buckets and makes their master weights from the values as given to rank 0.
  void initialize();

  /// Constants of each parameter's update; empty: it is not updated.
  using Coefficients = std::vector<std::optional<kernels::UpdateCoefficients>>;

  /// The buckets that the device updates, in the order in which the next forward needs them, and which of them is next.
  struct DeviceUpdates {
    const Coefficients& coefficients;
    kernels::UpdateControl control;  ///< Points to device memory: factor and skip may be undecided yet.
    int next = 0;                    ///< Buckets count down.
    std::size_t num_chunks = 0;      ///< Of the next one, that are done.
    bool is_expected = false;        ///< The store was told what comes.
    bool is_ending = false;          ///< The next one was updated, but its parameters do not rest yet.
    bool has_begun = false;          ///< Something was updated.
  };
  [[nodiscard]] DeviceUpdates device_updates(const Coefficients& coefficients, const kernels::UpdateControl& control) {
    return {coefficients, control, num_buckets() - 1};
  }
  /// Issues updates on the device; without `wait` as long as the next bucket's state is there, so that the host does
  /// not wait for a transfer. After an IoError the same call goes on where it was.
  void issue(DeviceUpdates& updates, bool wait);
  /// The chunks that the host updates, in order, and how many of them are done.
  struct HostUpdates {
    std::vector<ChunkId> chunks;
    std::size_t num_done = 0;
    int ending = -1;  ///< A bucket that was updated, but whose parameters do not rest yet; -1: none.
  };
  [[nodiscard]] HostUpdates host_updates(const Coefficients& coefficients);
  /// The next update begins with the first chunks, whatever the last one ended with.
  void begin_at_front() noexcept { goes_back_ = true; }
  /// Updates what is updated on the host with a gradient factor that is known, and in between issues what the device
  /// has come to be ready for. Returns how many elements that were. After an exception the same call goes on from the
  /// first chunk that was not updated.
  std::int64_t update_on_host(HostUpdates& updates, DeviceUpdates& on_device, float grad_factor);
  /// What update_on_host() does for one bucket that is updated on the host, down to addresses, for another thread to
  /// run. The host has waited for its gradients, and its state is lent until the lease ends. Empty: nothing is updated.
  /// The bucket's state is lent as one chunk.
  struct Prepared {
    Lease lease;
    BucketUpdate update;
  };
  [[nodiscard]] std::optional<Prepared> prepare(int bucket, const Coefficients& coefficients);
  /// The same of a bucket whose store lends it a chunk at a time: an update a chunk, which is lent when it runs. None:
  /// nothing is updated.
  [[nodiscard]] std::vector<BucketUpdate> prepare_chunks(int bucket, const Coefficients& coefficients);
  /// Forgets the gradients that an update of the bucket has used; memory whose address was prepared stays.
  void drop_gradients(int bucket, const Coefficients& coefficients);
  /// Runs one bucket's update where its route says, with what `control` points to there.
  /// Returns how many elements that were.
  std::int64_t update_bucket(int bucket, const Coefficients& coefficients, const kernels::UpdateControl& control);
  /// After an update: the caller's later work sees the new parameters of all ranks, where those rest whole, and the
  /// versions of all are bumped.
  void publish(const Coefficients& coefficients);
  /// Changes how a bucket is updated, between steps.
  void set_route(int bucket, UpdateRoute route);

  /// Makes the model's values of these parameters the master weights: what somebody wrote into them counts as exact.
  void take_edits(const std::vector<int>& parameters);

  /// A copy of an fp32 state of a parameter, whole and in its shape: one of state_names(), or "fp32_param". All ranks
  /// call it. Throws ConfigError for another name.
  [[nodiscard]] at::Tensor read(int parameter, const std::string& name);
  /// The opposite: each rank keeps its piece. Throws ConfigError where the shape differs.
  void write(int parameter, const std::string& name, const at::Tensor& value);
  /// Ends a load: ranks exchange their pieces of the parameters that rest whole, and the versions of all are bumped.
  /// All ranks call it.
  void publish_loaded();
  /// What BucketStates works on.
  [[nodiscard]] UpdatePipelineParts& parts() noexcept { return parts_; }
  [[nodiscard]] const std::vector<std::string>& state_names() const noexcept { return parts_.state_names; }

 private:
  using Way = UpdateRoutes::Way;
  [[nodiscard]] int num_buckets() const noexcept { return parts_.shards.buckets().num_buckets(); }
  [[nodiscard]] int bucket_of(int parameter) const { return parts_.shards.buckets().bucket_of(parameter); }
  [[nodiscard]] const Way& rest_way(int parameter) const { return parts_.routes.rest_way(bucket_of(parameter)); }
  [[nodiscard]] ChunkCursor cursor_of(int parameter, Access access) const {
    return {*rest_way(parameter).states, bucket_of(parameter), access};
  }
  [[nodiscard]] kernels::UpdateTask task_of(const ShardPiece& piece, const StateView& view,
                                            const ElementRange& elements, const kernels::UpdateCoefficients& constants);
  [[nodiscard]] std::vector<ChunkId> updated_chunks(int bucket, const Coefficients& coefficients) const;
  [[nodiscard]] Prepared prepare_chunk(ChunkId chunk, const Coefficients& coefficients,
                                       Access access = Access::kUpdate);
  std::int64_t update_chunk(ChunkId chunk, const Coefficients& coefficients, const kernels::UpdateControl& control);
  void update_chunks(DeviceUpdates& updates);
  void expect(DeviceUpdates& updates);
  void begin_bucket(const HostUpdates& updates);
  void end_bucket(int bucket, const Coefficients& coefficients);
  [[nodiscard]] at::Tensor as_rank_0_has_them(const at::Tensor& values);
  void gather_resting_whole();
  void set_master(int parameter, ChunkCursor& states, const float* values);
  void set_master_from_parameter(const ShardPiece& piece);
  void read_piece(const at::Tensor& whole, const ShardPiece& piece, Array array);
  void write_piece(const void* values, const ShardPiece& piece, ChunkCursor& states, Array array);
  [[nodiscard]] std::size_t width_of(Array array) const;
  [[nodiscard]] Array array_of(const std::string& name) const;

  UpdatePipelineParts parts_;
  bool goes_back_ = false;  ///< The last host_updates() began with the chunks that the one before ended with.
};

}  // namespace pannier
