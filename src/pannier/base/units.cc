#include "pannier/base/units.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "pannier/base/error.h"

namespace pannier {

std::size_t parse_bytes(std::string_view text) {
  static constexpr std::array<std::pair<std::string_view, double>, 10> kSuffixes{{{"", 1.0},
                                                                                  {"b", 1.0},
                                                                                  {"kb", 1e3},
                                                                                  {"mb", 1e6},
                                                                                  {"gb", 1e9},
                                                                                  {"tb", 1e12},
                                                                                  {"kib", 1024.0},
                                                                                  {"mib", 1048576.0},
                                                                                  {"gib", 1073741824.0},
                                                                                  {"tib", 1099511627776.0}}};
  const std::string owned(text);
  char* end = nullptr;
  const double number = std::strtod(owned.c_str(), &end);
  std::string suffix;
  for (const char* c = end; *c != '\0'; ++c) {
    if (std::isspace(static_cast<unsigned char>(*c)) == 0) {
      suffix.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(*c))));
    }
  }
  for (const auto& [name, factor] : kSuffixes) {
    if (suffix == name && end != owned.c_str() && std::isfinite(number) && number >= 0.0 && number * factor < 9e18) {
      return static_cast<std::size_t>(std::llround(number * factor));
    }
  }
  throw ConfigError(fmt::format("'{}' is not a size; write bytes or a size such as \"24GiB\" or \"512MB\"", text));
}

std::string format_bytes(std::size_t nbytes) {
  static constexpr std::array<const char*, 5> kNames{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(nbytes);
  std::size_t name = 0;
  while (value >= 1024.0 && name + 1 < kNames.size()) {
    value /= 1024.0;
    ++name;
  }
  return name == 0 ? fmt::format("{} B", nbytes) : fmt::format("{:.2f} {}", value, kNames.at(name));
}

}  // namespace pannier
