// The two engines, for make_io_engine alone.
#pragma once

#include <memory>

#include "pannier/io/io_engine.h"

namespace pannier::detail {

/// Throws IoError when the kernel refuses io_uring, or when a trial block does not come back through it.
std::unique_ptr<IoEngine> make_uring_engine(const DiskFile& file, const IoEngineOptions& options);

/// Works everywhere.
std::unique_ptr<IoEngine> make_thread_engine(const DiskFile& file, const IoEngineOptions& options);

/// Signals are for the program's threads: an engine's thread blocks them all while it starts and runs.
void block_signals() noexcept;

}  // namespace pannier::detail
