#include "pannier/ckpt/strict_json.h"

#include <fmt/format.h>

#include <cerrno>
#include <limits>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "pannier/base/error.h"

namespace pannier::ckpt {

using nlohmann::json;

namespace {
constexpr int kMaxDepth = 16;
constexpr std::size_t kShownBytes = 80;
}  // namespace

void bad_content(const std::string& file, const std::string& what) {
  throw IoError(fmt::format("'{}': {}", file, what), EBADMSG);
}

json parse_strict_json(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) {
      bad_content(file, fmt::format("JSON nested deeper than {}", kMaxDepth));
    }
    if (event == json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      bad_content(file, fmt::format("the name {} is there twice", shown(value)));
    }
    return true;
  };
  json root;
  try {
    root = json::parse(text, watch);
  } catch (const json::exception& error) {
    bad_content(file, fmt::format("not valid JSON ({})", error.what()));
  }
  if (!root.is_object()) {
    bad_content(file, fmt::format("a JSON object was expected, got {}", shown(root)));
  }
  return root;
}

const json& member(const json& object, const char* key, const std::string& file, const std::string& where) {
  if (!object.is_object()) {
    bad_content(file, fmt::format("{}: an object was expected, got {}", where, shown(object)));
  }
  const auto found = object.find(key);
  if (found == object.end()) {
    bad_content(file, fmt::format("{}: '{}' is missing", where, key));
  }
  return *found;
}

std::string text_of(const json& value, const std::string& file, const std::string& where) {
  if (!value.is_string()) {
    bad_content(file, fmt::format("{}: a string was expected, got {}", where, shown(value)));
  }
  return value.get<std::string>();
}

std::int64_t count_of(const json& value, const std::string& file, const std::string& where) {
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kLimit) {
    bad_content(file, fmt::format("{}: an integer from 0 to 2^63 - 1 was expected, got {}", where, shown(value)));
  }
  return static_cast<std::int64_t>(value.get<std::uint64_t>());
}

const json& array_of(const json& value, const std::string& file, const std::string& where) {
  if (!value.is_array()) {
    bad_content(file, fmt::format("{}: an array was expected, got {}", where, shown(value)));
  }
  return value;
}

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= kShownBytes ? text : text.substr(0, kShownBytes) + "...";
}

}  // namespace pannier::ckpt
