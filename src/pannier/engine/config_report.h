// What reading a configuration finds out besides its values: errors, collected so that all are said at once, and notes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "pannier/engine/config_parts.h"

namespace pannier::config {

/// Collects while a configuration is read.
struct Report {
  std::vector<std::string> errors;        ///< "path: what is wrong".
  std::vector<std::string> unknown_keys;  ///< The same, of keys that are not known.
  std::vector<std::string> notes;
  std::vector<std::string> ignored;       ///< Paths of keys without effect.
  std::vector<std::string> unused;        ///< Paths of keys that this version does nothing with yet.
  std::vector<std::string> refused_off;   ///< Paths of unsupported keys that are off.
  std::vector<std::string> decided_here;  ///< Paths left "auto" that get the default or the planner's choice.
  std::vector<LeftOverAuto> left_over_autos;
  AutoBatch auto_batch;
  std::map<std::string, std::string> written_as;  ///< The alias that the user wrote, by the path that it means.

  /// Adds an error about a key, under the name that the user wrote.
  void wrong(const std::string& path, const std::string& text);

  /// All notes, those about several keys in one line each.
  [[nodiscard]] std::vector<std::string> all_notes() const;

  /// Throws one ConfigError with all errors, if there is one; `source` is the file's path or "configuration".
  void throw_if_wrong(const std::string& source) const;
};

/// One message out of many: "source: the only one", or a line each.
[[nodiscard]] std::string join_errors(const std::string& source, const std::vector<std::string>& errors);

}  // namespace pannier::config
