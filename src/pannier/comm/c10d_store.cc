#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "pannier/comm/c10d_parts.h"

namespace pannier {
namespace {

class C10dStore final : public KeyValueStore {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(prefixed(key), value); }

  // A get of a key that is not there would wait for it.
  [[nodiscard]] std::optional<std::string> get(const std::string& key) override {
    const std::string name = prefixed(key);
    return store_->check({name}) ? std::optional(store_->get_to_str(name)) : std::nullopt;
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override { return store_->add(prefixed(key), amount); }

  // A file store counts each clone that ends as a rank that is done, and deletes the file too early; it and the store
  // of one process do not block, so they need no clone.
  [[nodiscard]] std::unique_ptr<KeyValueStore> clone() override {
    auto base = store_;
    if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(base.get())) {
      base = prefix->getUnderlyingNonPrefixStore();
    }
    const bool has_connection = dynamic_cast<c10d::TCPStore*>(base.get()) != nullptr;
    return std::make_unique<C10dStore>(has_connection ? store_->clone() : store_);
  }

 private:
  static std::string prefixed(const std::string& key) { return "pannier/" + key; }

  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::unique_ptr<KeyValueStore> make_c10d_store(const c10::intrusive_ptr<c10d::Store>& store) {
  return std::make_unique<C10dStore>(store)->clone();
}

}  // namespace pannier
