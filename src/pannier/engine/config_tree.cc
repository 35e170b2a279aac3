#include "pannier/engine/config_tree.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "pannier/base/error.h"
#include "pannier/engine/config_keys.h"

namespace pannier::config {
namespace {

// What stands for an infinite number between the two passes: JSON texts as long as the words, of characters that no
// configuration holds.
constexpr std::string_view kInfinityWord = "Infinity";
constexpr std::string_view kInfinityMark = "\"\\u0001\"";
constexpr std::string_view kMinusMark = "\"\\u0002\" ";
static_assert(kInfinityWord.size() == kInfinityMark.size() && kInfinityWord.size() + 1 == kMinusMark.size());

// Far more than any configuration has; a tree is walked by recursion.
constexpr int kGreatestDepth = 64;

std::string position(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const std::size_t line_start = before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return fmt::format("{}:{}", std::ranges::count(before, '\n') + 1, before.size() - line_start + 1);
}

// The end of the string literal or comment that starts at `start`, or `start` if none does.
std::size_t skip_literal(std::string_view text, std::size_t start) {
  const std::string_view rest = text.substr(start);
  std::size_t end = std::string_view::npos;
  if (rest.starts_with("//")) {
    end = text.find('\n', start);
  } else if (rest.starts_with("/*")) {
    end = text.find("*/", start + 2);
  } else if (rest.starts_with('"')) {
    end = start + 1;
    while (end < text.size() && text[end] != '"') {
      end += text[end] == '\\' ? 2 : 1;
    }
    ++end;
  } else {
    return start;
  }
  return std::min(end, text.size());
}

// Replaces the words that JSON does not have, outside of strings and comments, without moving anything.
std::string mark_infinities(std::string_view text, const std::string& source) {
  std::string marked(text);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t after = skip_literal(text, at);
    if (after > at) {
      at = after;
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && std::isalnum(static_cast<unsigned char>(text[end])) != 0) {
      ++end;
    }
    const std::string_view word = text.substr(at, end - at);
    if (word == kInfinityWord) {
      const bool minus = at > 0 && text[at - 1] == '-';
      marked.replace(minus ? at - 1 : at, word.size() + (minus ? 1 : 0), minus ? kMinusMark : kInfinityMark);
    } else if (word == "NaN") {
      throw ConfigError(fmt::format("{}:{}: NaN is not a value", source, position(text, at)));
    }
    at = std::max(end, at + 1);
  }
  return marked;
}

// Watches the parser: turns marks into numbers and finds keys that occur twice.
class Watcher {
 public:
  Watcher(Report& report, const std::string& source) : report_(report), source_(source) {}

  bool operator()(int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kGreatestDepth) {
      throw ConfigError(fmt::format("{}: not a configuration: nested more than {} deep", source_, kGreatestDepth));
    }
    switch (event) {
      case Json::parse_event_t::object_start:
        seen_.emplace_back();
        path_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        seen_.pop_back();
        path_.pop_back();
        break;
      case Json::parse_event_t::key:
        path_.back() = parsed.get<std::string>();
        if (!seen_.back().insert(path_.back()).second) {
          report_.wrong(fmt::format("{}", fmt::join(path_, ".")), "occurs twice");
        }
        break;
      case Json::parse_event_t::value:
        if (parsed == "\x01" || parsed == "\x02") {
          parsed = parsed == "\x01" ? kInfinity : -kInfinity;
        }
        break;
      default:
        break;
    }
    return true;
  }

 private:
  Report& report_;
  const std::string& source_;
  std::vector<std::set<std::string>> seen_;
  std::vector<std::string> path_;
};

// The parser's own words, without its prefixes.
std::string reason(const std::string& what) {
  const std::size_t column = what.find("column ");
  const std::size_t start = what.find(": ", column == std::string::npos ? 0 : column);
  if (start != std::string::npos) {
    return what.substr(start + 2);
  }
  const std::size_t bracket = what.find("] ");
  return bracket == std::string::npos ? what : what.substr(bracket + 2);
}

}  // namespace

Json parse_tree(std::string_view text, const std::string& source, Report& report) {
  if (std::ranges::all_of(text, [](unsigned char c) { return std::isspace(c) != 0; })) {
    throw ConfigError(fmt::format("{}: not JSON: the text is empty", source));
  }
  const std::string marked = mark_infinities(text, source);
  Json root;
  try {
    root = Json::parse(marked, Watcher(report, source), true, true);
  } catch (const Json::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: not JSON: {}", source, position(text, error.byte > 0 ? error.byte - 1 : 0),
                                  reason(error.what())));
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("{}: not JSON: {}", source, reason(error.what())));
  }
  if (!root.is_object()) {
    throw ConfigError(fmt::format("{}: wanted a JSON object, got {}", source, show(root)));
  }
  return root;
}

std::string show(const Json& value) {
  if (value.is_number_float() && std::isinf(value.get<double>())) {
    return value.get<double>() > 0 ? "Infinity" : "-Infinity";
  }
  constexpr std::size_t kGreatestLength = 60;
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kGreatestLength) {
    text = text.substr(0, kGreatestLength) + "...";
  }
  return text;
}

}  // namespace pannier::config
