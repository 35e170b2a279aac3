// The small shared memory through which ranks tell each other where they are and what went wrong, beside the
// collectives and not through them: it still works when a collective hangs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace pannier {

/// Text values by key, the same for every rank. Nothing here waits for a key to appear. One thread for each object; a
/// clone serves another thread.
class KeyValueStore {
 public:
  KeyValueStore() = default;
  virtual ~KeyValueStore() = default;
  KeyValueStore(const KeyValueStore&) = delete;
  KeyValueStore& operator=(const KeyValueStore&) = delete;

  virtual void set(const std::string& key, const std::string& value) = 0;
  [[nodiscard]] virtual std::optional<std::string> get(const std::string& key) = 0;
  /// Adds to a counter that begins at 0, and returns the sum. A counter's key is used with `add` alone.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
  [[nodiscard]] virtual std::unique_ptr<KeyValueStore> clone() = 0;
};

/// A store for ranks that are threads of one process.
class MemoryStore final : public KeyValueStore {
 public:
  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::optional<std::string> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  [[nodiscard]] std::unique_ptr<KeyValueStore> clone() override;

 private:
  struct Contents {
    std::mutex mutex;  ///< Guards the maps.
    std::map<std::string, std::string> values;
    std::map<std::string, std::int64_t> counters;
  };

  std::shared_ptr<Contents> contents_ = std::make_shared<Contents>();  ///< Shared by all clones.
};

}  // namespace pannier
