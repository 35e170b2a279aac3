// What `pannier doctor` says about the host.
#pragma once

#include <string>
#include <vector>

#include "pannier/hardware/host_info.h"

namespace pannier {

/// One line of a report; `advice` is empty when all is well.
struct ReportLine {
  std::string name;
  std::string value;
  std::string advice;
};

/// Describes the host, with advice where something will make training slower or fail.
[[nodiscard]] std::vector<ReportLine> report(const HostInfo& host);

}  // namespace pannier
