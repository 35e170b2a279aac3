// Bytes turned into what a broken disk or an attacker might leave.
#pragma once

#include <random>
#include <string>

namespace pannier::ckpt {

/// Changes, removes, repeats or inserts a few bytes.
inline std::string mutate(std::string text, std::mt19937_64& random) {
  static constexpr char kTokens[] = "{}[]\",:0123456789-e\\/.\0 ";
  for (std::uint64_t i = 0, count = 1 + random() % 4; i < count && !text.empty(); ++i) {
    const std::size_t at = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text[at] = kTokens[random() % (sizeof(kTokens) - 1)];
        break;
      case 2:
        text.erase(at, 1 + random() % 8);
        break;
      default:
        text.insert(at, text.substr(random() % text.size(), random() % 16));
    }
  }
  return text;
}

}  // namespace pannier::ckpt
