#include "pannier/tier/parameter_shards.h"

#include <fmt/format.h>

#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/mem/host_slab.h"

namespace pannier {
namespace {

class DeviceShards final : public ParameterShards {
 public:
  DeviceShards(Device& device, const std::vector<RestingShard>& shards) : device_(device) {
    for (const RestingShard& shard : shards) {
      shards_.push_back(device.allocate(shard.numel, shard.dtype, Owner::kParameters));
      device.fill_zero(shards_.back().data_ptr(), shards_.back().nbytes());
    }
  }

  [[nodiscard]] Home home() const noexcept override { return Home::kDevice; }
  void raise(int bucket, const at::Tensor& to) override {
    end_writes(bucket);
    copy(to, own(bucket));
  }
  void finish_raise(int /*bucket*/) override {}
  void store(int bucket, const at::Tensor& from) override { copy(own(bucket), from); }
  [[nodiscard]] at::Tensor own(int bucket) override { return shards_.at(static_cast<std::size_t>(bucket)); }
  void put_back(int /*bucket*/) override {}
  void settle(int /*bucket*/) override {}
  [[nodiscard]] std::byte* host_address(int /*bucket*/) override { return nullptr; }
  [[nodiscard]] std::span<std::byte> host_bytes() override { return {}; }

 private:
  void copy(const at::Tensor& to, const at::Tensor& from) {
    device_.copy_on_device(to.data_ptr(), from.data_ptr(), from.nbytes());
  }

  Device& device_;
  std::vector<at::Tensor> shards_;
};

class HostShards final : public ParameterShards {
 public:
  HostShards(Device& device, HostMemory& memory, Mover& up, Mover& down, const std::vector<RestingShard>& shards)
      : device_(device), up_(up), down_(down), slots_(shards.size()) {
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      slots_[i].shard = shards[i];
      slots_[i].offset = nbytes;
      nbytes += shards[i].nbytes();
    }
    slab_ = HostSlab(memory, nbytes, {.owner = "parameters"}, torch_parallel_for());
  }
  // The movers work on the slab and on what is kept for them.
  ~HostShards() override {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      end(slots_[i].up);
      end(slots_[i].down);
    }
  }

  [[nodiscard]] Home home() const noexcept override { return Home::kHost; }

  void raise(int bucket, const at::Tensor& to) override {
    Slot& slot = at(bucket);
    if (to.numel() == 0) {
      return;
    }
    PANNIER_CHECK(slot.up == nullptr, fmt::format("bucket {} is on its way up already", bucket));
    end_writes(bucket);
    free_sent();
    // `to` may be memory that the device's earlier work still uses, and the shard may still be on its way down.
    slot.up = up_.push_urgent({{to.data_ptr(), host_address(bucket), to.nbytes()}}, {device_.record(Queue::kCompute)},
                              slot.down, "parameters up", bucket);
  }

  void finish_raise(int bucket) override {
    Slot& slot = at(bucket);
    if (slot.up != nullptr) {
      device_.wait(Queue::kCompute, slot.up->wait_issued());
      slot.read = std::exchange(slot.up, nullptr);
    }
  }

  void store(int bucket, const at::Tensor& from) override {
    Slot& slot = at(bucket);
    if (from.numel() == 0) {
      return;
    }
    if (slot.down != nullptr) {
      slot.down->wait_done();  // What it reads is about to go.
    }
    slot.sent = from;
    slot.down = down_.push_urgent({{host_address(bucket), from.data_ptr(), from.nbytes()}},
                                  {device_.record(Queue::kCompute)}, nullptr, "parameters down", bucket);
    free_sent();
  }

  [[nodiscard]] at::Tensor own(int bucket) override {
    Slot& slot = at(bucket);
    if (!slot.lent.defined()) {
      slot.lent = device_.allocate(slot.shard.numel, slot.shard.dtype, Owner::kParameters);
      raise(bucket, slot.lent);
      finish_raise(bucket);
    }
    return slot.lent;
  }

  void put_back(int bucket) override {
    if (const at::Tensor lent = std::exchange(at(bucket).lent, at::Tensor()); lent.defined()) {
      store(bucket, lent);
    }
  }

  void settle(int bucket) override {
    Slot& slot = at(bucket);
    for (TransferPtr* transfer : {&slot.up, &slot.read, &slot.down}) {
      if (*transfer != nullptr) {
        (*transfer)->wait_done();
        transfer->reset();
      }
    }
    slot.sent = at::Tensor();
  }

  [[nodiscard]] TransferPtr on_its_way_down(int bucket) override { return at(bucket).down; }
  void comes_down(int bucket, TransferPtr transfer) override {
    at(bucket).down = std::move(transfer);
    free_sent();
  }

  [[nodiscard]] std::byte* host_address(int bucket) override { return slab_.data().data() + at(bucket).offset; }
  [[nodiscard]] std::span<std::byte> host_bytes() override { return slab_.data(); }

 private:
  struct Slot {
    RestingShard shard;
    std::size_t offset = 0;
    TransferPtr up;    ///< Until finish_raise().
    TransferPtr read;  ///< The last way up, after that.
    TransferPtr down;
    at::Tensor lent;  ///< What own() gave.
    at::Tensor sent;  ///< What is on its way down.
  };

  [[nodiscard]] Slot& at(int bucket) { return slots_.at(static_cast<std::size_t>(bucket)); }
  static void end(const TransferPtr& transfer) noexcept {
    if (transfer != nullptr) {
      transfer->wait_ended();
    }
  }
  // Device memory goes when its values have arrived; buckets are put back one after the other.
  void free_sent() {
    for (Slot& slot : slots_) {
      if (slot.sent.defined() && slot.down->is_done()) {
        slot.sent = at::Tensor();
      }
    }
  }

  Device& device_;
  Mover& up_;
  Mover& down_;
  std::vector<Slot> slots_;
  HostSlab slab_;
};

}  // namespace

std::vector<RestingShard> shards_of_type(at::ScalarType dtype, const std::vector<std::int64_t>& numels) {
  std::vector<RestingShard> shards;
  for (const std::int64_t numel : numels) {
    shards.push_back({numel, dtype});
  }
  return shards;
}

std::unique_ptr<ParameterShards> make_device_shards(Device& device, const std::vector<RestingShard>& shards) {
  return std::make_unique<DeviceShards>(device, shards);
}

std::unique_ptr<ParameterShards> make_host_shards(Device& device, HostMemory& memory, Mover& up, Mover& down,
                                                  const std::vector<RestingShard>& shards) {
  return std::make_unique<HostShards>(device, memory, up, down, shards);
}

}  // namespace pannier
