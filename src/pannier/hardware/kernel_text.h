// Reading the small text files in which the kernel describes itself. Nothing here throws: a file that is missing,
// unreadable or odd is a fact that is not known.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pannier {

/// The whole file; nothing when it cannot be opened or read.
[[nodiscard]] std::optional<std::string> read_kernel_text(const std::filesystem::path& path);

/// The text between spaces, tabs and newlines.
[[nodiscard]] std::vector<std::string_view> split_words(std::string_view text);

/// The text between `separator`s; empty parts are kept, the empty one after a last separator is not.
[[nodiscard]] std::vector<std::string_view> split_at(std::string_view text, char separator);

/// A whole non-negative number, spaces around it allowed. Too large for its type: the largest. Not a number ("max"):
/// nothing.
[[nodiscard]] std::optional<std::size_t> parse_count(std::string_view text);

/// The number that follows `name` in lines such as "MemTotal:  24684084 kB", in bytes where the unit is kB.
[[nodiscard]] std::optional<std::size_t> find_field(std::string_view text, std::string_view name);

/// The rest of the first line that begins with `name`, after the colon and the spaces there; empty without one.
[[nodiscard]] std::string_view line_value(std::string_view text, std::string_view name);

/// The numbers of a list such as "0-3,8"; parts that are not numbers are left out.
[[nodiscard]] std::vector<int> parse_id_list(std::string_view text);

/// The numbers of the cores that this process may run on, below the folder `root`; those that are online where its
/// affinity is not known.
[[nodiscard]] std::vector<int> allowed_cores(const std::filesystem::path& root);

}  // namespace pannier
