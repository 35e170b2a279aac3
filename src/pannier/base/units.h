// Sizes as people write and read them: "24GiB" to bytes and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pannier {

/// Reads a size such as "24GiB", "512 MB", "1.5GiB" or "1048576" (bytes). KB, MB, GB, TB are powers of 1000; KiB, MiB,
/// GiB, TiB powers of 1024. Throws ConfigError when the text is not a size, is negative or does not fit.
[[nodiscard]] std::size_t parse_bytes(std::string_view text);

/// Writes a size for people: "0 B", "812 B", "1.50 KiB", "9.77 GiB".
[[nodiscard]] std::string format_bytes(std::size_t nbytes);

/// Rounds up to the next multiple of `step`, which must be positive.
[[nodiscard]] constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) noexcept {
  return (value + step - 1) / step * step;
}

/// `from - amount`, and 0 where that would be negative.
[[nodiscard]] constexpr std::size_t saturating_sub(std::size_t from, std::size_t amount) noexcept {
  return from < amount ? 0 : from - amount;
}

/// Turns a count of elements into bytes. The one place where elements become bytes (both sides are checked
/// non-negative).
[[nodiscard]] constexpr std::size_t nbytes_of(std::int64_t numel, std::size_t element_nbytes) noexcept {
  return static_cast<std::size_t>(numel) * element_nbytes;
}

}  // namespace pannier
