// Feeds the header's parser; the first byte chooses how much data the file claims to have. `./dev fuzz` starts from
// tests/fuzz/seeds.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "pannier/base/error.h"
#include "pannier/ckpt/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) {
    return 0;
  }
  try {
    const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
    static_cast<void>(pannier::ckpt::parse_safetensors_header(text, data[0], "fuzz"));
  } catch (const pannier::IoError&) {
    return 0;
  }
  return 0;
}
