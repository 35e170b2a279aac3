#include "pannier/hardware/kernel_text.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>

namespace pannier {
namespace {

constexpr std::string_view kSpaces = " \t\r\n";
constexpr std::size_t kMostIds = 65536;  // Far above any machine; a mangled range must not fill memory.

std::string_view trim(std::string_view text) {
  const auto begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

}  // namespace

std::optional<std::string> read_kernel_text(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return std::nullopt;  // A stream opens a folder without complaint.
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return std::nullopt;
  }
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) {
    return std::nullopt;
  }
  return text;
}

std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  for (auto begin = text.find_first_not_of(kSpaces); begin != std::string_view::npos;) {
    const auto end = std::min(text.find_first_of(kSpaces, begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(kSpaces, end);
  }
  return words;
}

std::vector<std::string_view> split_at(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::optional<std::size_t> parse_count(std::string_view text) {
  text = trim(text);
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (end != text.data() + text.size() || error == std::errc::invalid_argument) {
    return std::nullopt;
  }
  return error == std::errc::result_out_of_range ? std::numeric_limits<std::size_t>::max() : value;
}

std::optional<std::size_t> find_field(std::string_view text, std::string_view name) {
  for (const auto line : split_at(text, '\n')) {
    const auto words = split_words(line);
    const auto found = std::find(words.begin(), words.end(), name);
    if (found == words.end() || found + 1 == words.end()) {
      continue;
    }
    const auto value = parse_count(found[1]);
    if (value && found + 2 != words.end() && found[2] == "kB") {
      return *value > std::numeric_limits<std::size_t>::max() / 1024 ? std::numeric_limits<std::size_t>::max()
                                                                     : *value * 1024;
    }
    return value;
  }
  return std::nullopt;
}

std::string_view line_value(std::string_view text, std::string_view name) {
  for (const auto line : split_at(text, '\n')) {
    const auto colon = line.find(':');
    if (colon == std::string_view::npos || line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1) != name) {
      continue;
    }
    const auto value = line.substr(colon + 1);
    return value.substr(std::min(value.find_first_not_of(" \t"), value.size()));
  }
  return {};
}

std::vector<int> parse_id_list(std::string_view text) {
  std::vector<int> ids;
  for (const auto part : split_at(trim(text), ',')) {
    const auto dash = part.find('-');
    const auto first = parse_count(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_count(part.substr(dash + 1));
    if (!first || !last || *last >= kMostIds) {
      continue;
    }
    for (auto id = *first; id <= *last; ++id) {
      ids.push_back(static_cast<int>(id));
    }
  }
  return ids;
}

std::vector<int> allowed_cores(const std::filesystem::path& root) {
  const std::string status = read_kernel_text(root / "proc/self/status").value_or("");
  std::vector<int> cores = parse_id_list(line_value(status, "Cpus_allowed_list"));
  return cores.empty() ? parse_id_list(read_kernel_text(root / "sys/devices/system/cpu/online").value_or("")) : cores;
}

}  // namespace pannier
