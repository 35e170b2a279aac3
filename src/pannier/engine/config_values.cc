#include "pannier/engine/config_values.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/units.h"

namespace pannier::config {
namespace {

constexpr double kGreatestWhole = 9e18;

bool in_range(const KeyRow& row, double value) {
  if (std::isnan(value) || (std::isinf(value) && !row.may_be_infinite)) {
    return false;
  }
  return (row.least_excluded ? value > row.least : value >= row.least) &&
         (row.greatest_excluded ? value < row.greatest : value <= row.greatest);
}

std::string range_text(const KeyRow& row) {
  const bool has_least = std::isfinite(row.least);
  if (has_least && std::isfinite(row.greatest)) {
    return fmt::format(" from {} to {}{}", row.least, row.greatest_excluded ? "less than " : "", row.greatest);
  }
  return has_least ? fmt::format(" {} {}", row.least_excluded ? "above" : "of at least", row.least) : std::string();
}

std::string wanted_text(const KeyRow& row) {
  switch (row.kind) {
    case Kind::kSection:
    case Kind::kOpaque:
      return "an object";
    case Kind::kBool:
      return "true or false";
    case Kind::kInteger:
    case Kind::kSize:
      return "a whole number" + range_text(row);
    case Kind::kNumber:
      return "a number" + range_text(row);
    case Kind::kBytes:
      return "bytes or a size such as \"24GiB\"," + range_text(row);
    case Kind::kChoice:
      return fmt::format("one of \"{}\"", fmt::join(split(row.choices), "\", \""));
    case Kind::kPerGroup:
      return fmt::format("a number{}, or a list with one a parameter group", range_text(row));
    case Kind::kBetas:
      return "two numbers" + range_text(row);
    case Kind::kPaths:
      return "a text, or a list of texts";
    case Kind::kText:
    case Kind::kAny:
    case Kind::kPresence:
      break;
  }
  return "a text";
}

std::optional<Value> convert_number(const KeyRow& row, const Json& value, bool& rounded) {
  if (!value.is_number() || !in_range(row, value.get<double>())) {
    return std::nullopt;
  }
  if (row.kind == Kind::kNumber) {
    return value.get<double>();
  }
  const auto number = value.get<double>();
  if (std::abs(number) > kGreatestWhole || (row.kind != Kind::kSize && number != std::floor(number))) {
    return std::nullopt;
  }
  rounded = number != std::floor(number);
  return value.is_number_float() ? static_cast<std::int64_t>(std::llround(number)) : value.get<std::int64_t>();
}

std::optional<Value> convert_bytes(const KeyRow& row, const Json& value) {
  bool rounded = false;
  if (!value.is_string()) {
    return convert_number(row, value, rounded);
  }
  try {
    const auto nbytes = static_cast<std::int64_t>(parse_bytes(value.get<std::string>()));
    return in_range(row, static_cast<double>(nbytes)) ? std::optional<Value>(nbytes) : std::nullopt;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

std::optional<Value> convert_choice(const KeyRow& row, const Json& value) {
  if (!value.is_string()) {
    return std::nullopt;
  }
  const auto written = value.get<std::string>();
  const auto same = [&row](unsigned char a, unsigned char b) {
    return row.any_case ? std::tolower(a) == std::tolower(b) : a == b;
  };
  for (const std::string_view choice : split(row.choices)) {
    if (std::ranges::equal(choice, written, same)) {
      return std::string(choice);
    }
  }
  return std::nullopt;
}

std::optional<Value> convert_list(const KeyRow& row, const Json& value) {
  const auto fits = [&row](const Json& one) { return one.is_number() && in_range(row, one.get<double>()); };
  if (row.kind == Kind::kPerGroup && fits(value)) {
    return PerGroup(value.get<double>());
  }
  if (!value.is_array() || !std::ranges::all_of(value, fits) || (row.kind == Kind::kBetas && value.size() != 2)) {
    return std::nullopt;
  }
  return PerGroup(value.get<std::vector<double>>());
}

std::optional<Value> convert_paths(const Json& value) {
  const auto fits = [](const Json& one) { return one.is_string() && !one.get<std::string>().empty(); };
  if (value.is_string()) {
    return Texts{value.get<std::string>()};
  }
  if (!value.is_array() || value.empty() || !std::ranges::all_of(value, fits)) {
    return std::nullopt;
  }
  return value.get<Texts>();
}

}  // namespace

std::optional<Value> convert(const KeyRow& row, const Json& value, std::string& wanted, bool& rounded) {
  rounded = false;
  wanted = wanted_text(row);
  switch (row.kind) {
    case Kind::kBool:
      if (value == 0 || value == 1) {  // Other programs write them so; a text is never a boolean.
        return value == 1;
      }
      return value.is_boolean() ? std::optional<Value>(value.get<bool>()) : std::nullopt;
    case Kind::kInteger:
    case Kind::kSize:
    case Kind::kNumber:
      return convert_number(row, value, rounded);
    case Kind::kBytes:
      return convert_bytes(row, value);
    case Kind::kChoice:
      return convert_choice(row, value);
    case Kind::kPerGroup:
    case Kind::kBetas:
      return convert_list(row, value);
    case Kind::kPaths:
      return convert_paths(value);
    case Kind::kText:
      return value.is_string() ? std::optional<Value>(value.get<std::string>()) : std::nullopt;
    case Kind::kSection:
    case Kind::kOpaque:
    case Kind::kPresence:
    case Kind::kAny:
      break;
  }
  return show(value);
}

Value Values::get(const std::string& path) const {
  if (const auto found = given_.find(path); found != given_.end()) {
    return found->second;
  }
  const KeyRow* row = find_key(path);
  PANNIER_CHECK(row != nullptr && row->standard != "-", "no value and no default for " + path);
  std::string wanted;
  bool rounded = false;
  const std::optional<Value> standard = convert(*row, Json::parse(row->standard), wanted, rounded);
  PANNIER_CHECK(standard.has_value(), "the default of " + path + " does not fit it");
  return *standard;
}

}  // namespace pannier::config
