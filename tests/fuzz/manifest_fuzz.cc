#include <cstddef>
#include <cstdint>
#include <string_view>

#include "pannier/base/error.h"
#include "pannier/ckpt/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    static_cast<void>(pannier::ckpt::parse_manifest({reinterpret_cast<const char*>(data), size}, "fuzz"));
  } catch (const pannier::IoError&) {
    return 0;
  }
  return 0;
}
