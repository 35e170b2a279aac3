// How fast a folder's disk is when it is used as training uses it: the same scratch file, pieces and depth.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pannier/io/io_engine.h"
#include "pannier/mem/host_slab.h"

namespace pannier {

/// What to measure with.
struct DiskRateOptions {
  std::size_t file_nbytes = std::size_t{1} << 30;
  std::size_t request_nbytes = std::size_t{8} << 20;  ///< Of one transfer, as a tier pushes it.
  double seconds = 2.0;                               ///< Of each measurement.
  IoEngineOptions engine = {};                        ///< Pieces, depth, and which engine.
  /// Throws ConfigError when a field makes no sense.
  void validate() const;
};

/// What moves in a measurement.
enum class DiskTraffic { kRead, kWrite, kMixed };

/// Measures one set of folders by one file, written once before. One thread.
class DiskRateProbe {
 public:
  /// Creates the file and writes all of it. Throws as DiskFile and make_io_engine do.
  DiskRateProbe(HostMemory& memory, const std::vector<std::string>& folders, const DiskRateOptions& options);

  /// Bytes per second, read and written together; from front to back, over and over. kMixed reads one half of the file
  /// while it writes the other, the same number of bytes.
  [[nodiscard]] double measure(DiskTraffic traffic);
  /// "io_uring" or "threads".
  [[nodiscard]] const char* engine_name() const noexcept { return engine_->name(); }
  [[nodiscard]] const DiskFile& file() const noexcept { return file_; }
  [[nodiscard]] const IoEngine& engine() const noexcept { return *engine_; }

 private:
  double run(DiskTraffic traffic, const std::function<bool(std::size_t moved, double elapsed)>& is_enough);

  DiskRateOptions options_;
  DiskFile file_;
  HostSlab memory_;
  std::unique_ptr<IoEngine> engine_;  ///< Before the memory that it uses goes, it ends.
};

}  // namespace pannier
