// Reads configurations for tests and gives back the message of an error.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <string_view>

#include "pannier/base/error.h"
#include "pannier/engine/config.h"

namespace pannier {

/// The message with which `text` is refused; "accepted" if it is not.
inline std::string error_of(std::string_view text) {
  try {
    (void)Config::from_text(text);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

/// The message of a call that throws ConfigError; "accepted" if it does not.
template <class Call>
std::string error_of_call(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

/// All notes of a configuration, a line each.
inline std::string notes_of(std::string_view text) {
  std::string all;
  for (const std::string& note : Config::from_text(text).notes) {
    all += note + "\n";
  }
  return all;
}

}  // namespace pannier
