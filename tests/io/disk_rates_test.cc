#include "pannier/io/disk_rates.h"

#include <gmock/gmock.h>

#include "pannier/base/error.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

TEST(DiskRateProbe, MeasuresEveryTraffic) {
  const TemporaryFolder folder;
  HostMemory memory;
  DiskRateProbe probe(memory, {folder.path()},
                      {.file_nbytes = 8 << 20, .request_nbytes = 1 << 20, .seconds = 0.01, .engine = {.depth = 4}});
  for (const auto traffic : {DiskTraffic::kRead, DiskTraffic::kWrite, DiskTraffic::kMixed}) {
    EXPECT_GT(probe.measure(traffic), 0.0);
  }
  EXPECT_GE(probe.engine().stats().written_bytes, std::size_t{8} << 20);
  EXPECT_THROW(DiskRateProbe(memory, {folder.path()}, {.file_nbytes = 3 << 20, .request_nbytes = 1 << 20}),
               ConfigError);
}

}  // namespace
}  // namespace pannier
