// JSON from a file that nobody vouches for: no key twice, no deep nesting, and errors that name file and place. Only
// sources of this folder include this header.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace pannier::ckpt {

/// Parses one JSON object. Throws IoError naming `file` when the text is not one, or names a key twice.
[[nodiscard]] nlohmann::json parse_strict_json(std::string_view text, const std::string& file);

/// Throws IoError(EBADMSG): `file`, then `what`.
[[noreturn]] void bad_content(const std::string& file, const std::string& what);

/// The member `key` of `object`. Throws IoError naming `where` when it is missing.
[[nodiscard]] const nlohmann::json& member(const nlohmann::json& object, const char* key, const std::string& file,
                                           const std::string& where);
/// `value` as a string. Throws IoError naming `where` and the value.
[[nodiscard]] std::string text_of(const nlohmann::json& value, const std::string& file, const std::string& where);
/// `value` as an integer from 0 to 2^63 - 1. Throws IoError naming `where` and the value.
[[nodiscard]] std::int64_t count_of(const nlohmann::json& value, const std::string& file, const std::string& where);
/// `value` as an array. Throws IoError naming `where` and the value.
[[nodiscard]] const nlohmann::json& array_of(const nlohmann::json& value, const std::string& file,
                                             const std::string& where);
/// `value` cut to a length fit for a message.
[[nodiscard]] std::string shown(const nlohmann::json& value);

}  // namespace pannier::ckpt
