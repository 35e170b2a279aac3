#include "pannier/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace pannier::log {
namespace {
// Looks the logger up by name, so that a program that uses spdlog may replace it with its own.
std::shared_ptr<spdlog::logger> logger() {
  if (auto existing = spdlog::get("pannier")) {
    return existing;
  }
  try {
    auto created = spdlog::stderr_logger_mt("pannier");
    created->set_pattern("%n: %l: %v");
    return created;
  } catch (const spdlog::spdlog_ex&) {
    return spdlog::get("pannier");  // Another thread created it between the two calls.
  }
}
}  // namespace

void info(const std::string& message) { logger()->info(message); }
void warning(const std::string& message) { logger()->warn(message); }

}  // namespace pannier::log
