// JSON text to a tree: comments are allowed, Infinity (as Python's json writes it) is a number, a key may occur once.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "pannier/engine/config_report.h"

namespace pannier::config {

using Json = nlohmann::ordered_json;

/// Parses an object. Throws ConfigError, starting with "source:line:column", for text that is not JSON; keys that occur
/// twice go into the report.
[[nodiscard]] Json parse_tree(std::string_view text, const std::string& source, Report& report);

/// Brings a tree into the table's shape: dotted keys become nested, aliases and deprecated keys become what they mean.
void normalize_tree(Json& root, Report& report);

/// A value as a message shows it.
[[nodiscard]] std::string show(const Json& value);

}  // namespace pannier::config
