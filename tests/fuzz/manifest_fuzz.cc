// Feeds the parsers of manifests and of shares. A manifest's checksum is mended first, so that what it guards is
// reached.
// `./dev fuzz` starts from tests/fuzz/seeds.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "pannier/base/error.h"
#include "pannier/ckpt/manifest.h"
#include "pannier/ckpt/share.h"
#include "pannier/io/checksum.h"

namespace {

std::string with_its_checksum(std::string_view text) {
  nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || root.erase("checksum") == 0) {
    return std::string(text);
  }
  const std::string content = root.dump();
  root["checksum"] = fmt::format("{:016x}", pannier::checksum(std::as_bytes(std::span(content))));
  return root.dump();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    static_cast<void>(pannier::ckpt::parse_manifest(with_its_checksum(text), "fuzz"));
  } catch (const pannier::IoError&) {
  }
  try {
    static_cast<void>(pannier::ckpt::parse_share(text, "fuzz"));
  } catch (const pannier::IoError&) {
  }
  return 0;
}
