#include "pannier/engine/config.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "pannier/base/error.h"
#include "pannier/engine/config_build.h"

namespace pannier {
namespace {

// A configuration has a few kB; more is another kind of file.
constexpr std::uintmax_t kGreatestFileNbytes = std::uintmax_t{16} << 20;

Config read(std::string_view text, const std::string& source) {
  config::Report report;
  config::Json root = config::parse_tree(text, source, report);
  config::normalize_tree(root, report);
  const config::Values values = config::check_tree(root, report);
  Config built = config::build_config(values, root, report);
  if (built.pannier.unknown_keys_warn) {
    report.notes.insert(report.notes.end(), report.unknown_keys.begin(), report.unknown_keys.end());
    report.unknown_keys.clear();
  }
  report.throw_if_wrong(source);
  built.notes = report.all_notes();
  built.left_over_autos = report.left_over_autos;
  built.auto_batch = report.auto_batch;
  return built;
}

std::string content_of(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  const std::string what = fmt::format("read the configuration '{}'", path);
  if (std::filesystem::is_directory(status)) {
    throw IoError(what, EISDIR);
  }
  if (!std::filesystem::exists(status)) {
    throw IoError(what, error && error.value() != 0 ? error.value() : ENOENT);
  }
  if (std::filesystem::is_regular_file(status) && std::filesystem::file_size(path, error) > kGreatestFileNbytes) {
    throw ConfigError(fmt::format("{}: too large for a configuration", path));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file.is_open() && file.peek() != std::ifstream::traits_type::eof()) {
    content << file.rdbuf();
  }
  if (!file.is_open() || file.bad()) {
    throw IoError(what, errno != 0 ? errno : EIO);
  }
  return content.str();
}

}  // namespace

const char* to_string(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kFp32:
      return "fp32";
    case Dtype::kFp16:
      return "fp16";
    case Dtype::kBf16:
      return "bf16";
  }
  return "?";
}

Config Config::from_text(std::string_view text) { return read(text, "configuration"); }

Config Config::from_file(const std::string& path) { return read(content_of(path), path); }

LossScaleOptions Config::effective_loss_scale() const {
  return dtype == Dtype::kFp16 ? loss_scale : LossScaleOptions{.static_scale = 1};
}

}  // namespace pannier
