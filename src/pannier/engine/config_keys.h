// The table of every key that a configuration may hold: the keys of DeepSpeed 0.19.6 and Pannier's own. Checking,
// defaults, `config_keys()` and docs/config.md all follow from it.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pannier::config {

/// What a key's value must be.
enum class Kind : std::uint8_t {
  kSection,   ///< An object whose keys are in the table.
  kOpaque,    ///< An object whose content is not looked at, but for the switch in it.
  kPresence,  ///< Anything; on when it is there and not null.
  kBool,
  kInteger,  ///< A whole number; 5e8 is one.
  kSize,     ///< A count of elements; a fraction is rounded with a note.
  kNumber,
  kBytes,  ///< Bytes, or a text such as "24GiB".
  kText,
  kPaths,     ///< A text, or a list of texts that are not empty.
  kChoice,    ///< One of `choices`, separated by '|'.
  kPerGroup,  ///< A number, or a list with one number a parameter group.
  kBetas,     ///< Two numbers.
  kAny,
};

/// What Pannier does with a key.
enum class Status : std::uint8_t {
  kSupported,
  kIgnored,  ///< It means nothing here, and won't.
  kRefused,
  kUnused,  ///< Its value is kept, but this version does nothing with it.
};

/// What "auto" means where nobody has replaced it.
enum class Auto : std::uint8_t { kDefault, kAlwaysNeeded, kOptimizerNeeds, kScheduleNeeds, kBatch };

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One row of the table.
struct KeyRow {
  std::string_view path;
  Kind kind = Kind::kAny;
  Status status = Status::kSupported;
  std::string_view standard = "-";  ///< The default as JSON; "-" for none.
  double least = -kInfinity;
  double greatest = kInfinity;
  bool least_excluded = false;
  bool greatest_excluded = false;
  bool may_be_infinite = false;
  bool any_case = false;          ///< A choice's letters may be of either case.
  std::string_view choices = {};  ///< Of a kChoice.
  std::string_view types = {};    ///< The optimizer or schedule types that have this key, separated by '|'; empty: all.
  Auto left_auto = Auto::kDefault;

  [[nodiscard]] constexpr KeyRow from(double bound) const { return with(&KeyRow::least, bound); }
  [[nodiscard]] constexpr KeyRow to(double bound) const { return with(&KeyRow::greatest, bound); }
  [[nodiscard]] constexpr KeyRow above(double bound) const { return from(bound).with(&KeyRow::least_excluded, true); }
  [[nodiscard]] constexpr KeyRow below(double bound) const { return to(bound).with(&KeyRow::greatest_excluded, true); }
  [[nodiscard]] constexpr KeyRow infinite() const { return with(&KeyRow::may_be_infinite, true); }
  [[nodiscard]] constexpr KeyRow either_case() const { return with(&KeyRow::any_case, true); }
  [[nodiscard]] constexpr KeyRow one_of(std::string_view list) const { return with(&KeyRow::choices, list); }
  [[nodiscard]] constexpr KeyRow of(std::string_view list) const { return with(&KeyRow::types, list); }
  [[nodiscard]] constexpr KeyRow when_auto(Auto use) const { return with(&KeyRow::left_auto, use); }

 private:
  template <class T>
  [[nodiscard]] constexpr KeyRow with(T KeyRow::* field, T value) const {
    KeyRow row = *this;
    row.*field = value;
    return row;
  }
};

/// Another name of a key.
struct Alias {
  std::string_view written;
  std::string_view meant;
  bool deprecated = false;
};

/// The rows of training (batch, precision, optimizer, schedule, gradients), of zero_optimization, and of the rest.
[[nodiscard]] std::span<const KeyRow> training_keys();
[[nodiscard]] std::span<const KeyRow> zero_keys();
[[nodiscard]] std::span<const KeyRow> other_keys();
[[nodiscard]] std::span<const Alias> aliases();

/// Every row, in the order of docs/config.md.
[[nodiscard]] std::vector<const KeyRow*> all_keys();

/// The row of a dotted path, or null.
[[nodiscard]] const KeyRow* find_key(std::string_view path);

/// The parts of "a|b|c".
[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator = '|');

/// Whether a row applies to an optimizer or schedule type, whose case does not count.
[[nodiscard]] bool applies_to(const KeyRow& row, std::string_view type);

/// What an unknown key was probably meant to be, as the end of a message; `type` is the optimizer or schedule type
/// around it, if any.
[[nodiscard]] std::string advice_for_unknown(const std::string& path, std::string_view type);

}  // namespace pannier::config
