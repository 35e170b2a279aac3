// How patient a group of ranks is.
#pragma once

#include <chrono>

#include "pannier/comm/monitor.h"

namespace pannier {

struct GroupOptions {
  /// How long an operation may take from the moment at which this rank waits for it.
  std::chrono::milliseconds collective_timeout{600'000};
  MonitorOptions monitor;

  /// Throws ConfigError for times that are not positive.
  void validate() const;
};

}  // namespace pannier
