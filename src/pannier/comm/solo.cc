#include "pannier/comm/communicator.h"

namespace pannier {
namespace {

class SoloCommunicator final : public Communicator {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int world_size() const noexcept override { return 1; }
  void sum(std::span<std::int64_t> /*values*/) override {}
};

}  // namespace

std::unique_ptr<Communicator> make_solo_communicator() { return std::make_unique<SoloCommunicator>(); }

}  // namespace pannier
