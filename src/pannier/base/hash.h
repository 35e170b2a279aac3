// A hash that is the same on every machine and in every build, which std::hash does not promise.
#pragma once

#include <cstdint>
#include <string_view>

namespace pannier {

/// FNV-1a of the text's bytes.
[[nodiscard]] constexpr std::uint64_t fnv1a(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  }
  return hash;
}

}  // namespace pannier
