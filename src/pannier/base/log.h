// One line per event, to stderr, through spdlog. Components return Stats; only the engine and the command line speak.
#pragma once

#include <string>

namespace pannier::log {

/// Says something that a user may want to know. Thread-safe.
void info(const std::string& message);

/// Says something that a user should act on. Thread-safe.
void warning(const std::string& message);

}  // namespace pannier::log
