#include "pannier/engine/config_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "pannier/base/error.h"

namespace pannier::config {

void Report::wrong(const std::string& path, const std::string& text) {
  const auto alias = written_as.find(path);
  if (alias == written_as.end()) {
    errors.push_back(fmt::format("{}: {}", path, text));
  } else {
    errors.push_back(fmt::format("{} (written {}): {}", path, alias->second, text));
  }
}

std::vector<std::string> Report::all_notes() const {
  std::vector<std::string> all = notes;
  const auto add = [&all](const char* text, const std::vector<std::string>& paths) {
    if (!paths.empty()) {
      all.push_back(fmt::format("{}: {}", text, fmt::join(paths, ", ")));
    }
  };
  add("accepted, without effect here", ignored);
  add("accepted, but this version does nothing with", unused);
  add("not supported, and off", refused_off);
  add("left \"auto\", decided here", decided_here);
  return all;
}

void Report::throw_if_wrong(const std::string& source) const {
  std::vector<std::string> all = unknown_keys;
  all.insert(all.end(), errors.begin(), errors.end());
  if (!all.empty()) {
    throw ConfigError(join_errors(source, all));
  }
}

std::string join_errors(const std::string& source, const std::vector<std::string>& errors) {
  if (errors.size() == 1) {
    return fmt::format("{}: {}", source, errors.front());
  }
  return fmt::format("{}: {} errors\n  {}", source, errors.size(), fmt::join(errors, "\n  "));
}

}  // namespace pannier::config
