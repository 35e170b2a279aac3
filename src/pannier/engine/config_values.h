// The values of a checked configuration by dotted path, with the table's defaults behind them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "pannier/engine/config_keys.h"
#include "pannier/engine/config_tree.h"
#include "pannier/optim/schedule.h"

namespace pannier::config {

/// A value as the table's kinds hold it: kInteger, kSize and kBytes are int64, kText and kChoice strings, kPaths Texts,
/// kBetas and kPerGroup a PerGroup.
using Texts = std::vector<std::string>;
using Value = std::variant<bool, std::int64_t, double, std::string, Texts, PerGroup>;

/// Turns a JSON value into a row's kind. Empty, with `wanted` set to what the row wants, if it does not fit; `rounded`
/// says that a fraction was rounded.
[[nodiscard]] std::optional<Value> convert(const KeyRow& row, const Json& value, std::string& wanted, bool& rounded);

/// What was given and is valid.
class Values {
 public:
  void set(const std::string& path, Value value) { given_.insert_or_assign(path, std::move(value)); }
  [[nodiscard]] bool has(const std::string& path) const { return given_.contains(path); }

  /// The given value, else the table's default. Throws InternalError where there is neither or the kind is another.
  [[nodiscard]] bool flag(const std::string& path) const { return std::get<bool>(get(path)); }
  [[nodiscard]] std::int64_t whole(const std::string& path) const { return std::get<std::int64_t>(get(path)); }
  [[nodiscard]] double number(const std::string& path) const { return std::get<double>(get(path)); }
  [[nodiscard]] std::string text(const std::string& path) const { return std::get<std::string>(get(path)); }
  [[nodiscard]] PerGroup per_group(const std::string& path) const { return std::get<PerGroup>(get(path)); }

  /// The given value, if any.
  template <class T>
  [[nodiscard]] std::optional<T> find(const std::string& path) const {
    const auto found = given_.find(path);
    return found == given_.end() ? std::nullopt : std::optional<T>(std::get<T>(found->second));
  }

 private:
  [[nodiscard]] Value get(const std::string& path) const;

  std::map<std::string, Value> given_;
};

/// Checks a normalized tree against the table: unknown keys, kinds, ranges, unsupported keys that are on, "auto".
[[nodiscard]] Values check_tree(const Json& root, Report& report);

}  // namespace pannier::config
