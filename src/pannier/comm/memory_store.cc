#include "pannier/comm/key_value_store.h"

namespace pannier {

void MemoryStore::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(contents_->mutex);
  contents_->values[key] = value;
}

std::optional<std::string> MemoryStore::get(const std::string& key) {
  const std::lock_guard lock(contents_->mutex);
  const auto found = contents_->values.find(key);
  return found == contents_->values.end() ? std::nullopt : std::optional(found->second);
}

std::int64_t MemoryStore::add(const std::string& key, std::int64_t amount) {
  const std::lock_guard lock(contents_->mutex);
  return contents_->counters[key] += amount;
}

std::unique_ptr<KeyValueStore> MemoryStore::clone() {
  auto copy = std::make_unique<MemoryStore>();
  copy->contents_ = contents_;
  return copy;
}

}  // namespace pannier
