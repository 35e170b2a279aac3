// Checks a tree against the key table, and collects its values.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "pannier/engine/config_values.h"

namespace pannier::config {
namespace {

// The keys by which features of DeepSpeed are turned on.
constexpr std::array<std::string_view, 3> kSwitches{"enabled", "deepcompile", "autotp_size"};

bool is_switch(const std::string& key) { return std::ranges::find(kSwitches, key) != kSwitches.end(); }

bool is_truthy(const Json& value) {
  return value == true || (value.is_number() && value.get<double>() > 1.0) ||
         (value.is_string() && value != "" && value != "auto");
}

// Looks for switches in an object: whether there is one, and whether one is on.
void look_for_switches(const Json& object, bool& found, bool& on) {
  for (const auto& item : object.items()) {
    if (item.value().is_object()) {
      look_for_switches(item.value(), found, on);
    } else if (is_switch(item.key())) {
      found = true;
      on = on || is_truthy(item.value());
    }
  }
}

// Whether an unsupported object asks for something: by its switches, else by anything in it that is not false, 0, 1 or
// empty.
bool asks_for_something(const Json& object) {
  bool found = false;
  bool on = false;
  look_for_switches(object, found, on);
  if (found) {
    return on;
  }
  return std::ranges::any_of(object, [](const Json& value) {
    return value.is_object() ? asks_for_something(value) : is_truthy(value) || (value.is_array() && !value.empty());
  });
}

class Checker {
 public:
  Checker(Report& report, Values& values) : report_(report), values_(values) {}

  void walk(const Json& object, const std::string& section, const std::string& type) {
    for (const auto& item : object.items()) {
      const std::string path = section.empty() ? item.key() : section + "." + item.key();
      const KeyRow* row = find_key(path);
      if (row == nullptr) {
        report_.unknown_keys.push_back(fmt::format("{}: {}", path, advice_for_unknown(path, type)));
      } else if (!applies_to(*row, type)) {
        report_.unknown_keys.push_back(
            fmt::format("{}: not a parameter of {}; it belongs to {}", path, type, fmt::join(split(row->types), ", ")));
      } else if (!item.value().is_null()) {
        check(*row, item.value(), path, type);
      }
    }
  }

 private:
  // Whether a type has parameters in the table. One that has not is refused elsewhere, with its parameters.
  static bool knows_type(const std::string& params, const std::string& type) {
    return std::ranges::any_of(all_keys(), [&](const KeyRow* row) {
      return row->path.starts_with(params) && !row->types.empty() && applies_to(*row, type);
    });
  }

  void check(const KeyRow& row, const Json& value, const std::string& path, const std::string& type) {
    switch (row.kind) {
      case Kind::kSection:
      case Kind::kOpaque:
        return check_object(row, value, path, type);
      case Kind::kPresence:
        return is_off(value) ? note_off(path) : refuse(path, value);
      default:
        return value == "auto" ? take_auto(row, path) : check_scalar(row, value, path);
    }
  }

  static bool is_off(const Json& value) { return value == false || value == "auto"; }

  void check_object(const KeyRow& row, const Json& value, const std::string& path, const std::string& type) {
    if (row.kind == Kind::kOpaque && value.is_boolean() && row.status == Status::kRefused) {
      return value == true ? refuse(path, value) : note_off(path);
    }
    if (!value.is_object()) {
      return report_.wrong(path, fmt::format("wanted an object, got {}", show(value)));
    }
    if (row.kind == Kind::kSection) {
      // The type decides which parameters there are.
      const auto own_type = value.find("type");
      const bool typed = own_type != value.end() && own_type->is_string() && *own_type != "auto";
      if (!path.ends_with(".params") || type.empty() || knows_type(path, type)) {
        walk(value, path, typed ? own_type->get<std::string>() : type);
      }
      return;
    }
    if (row.status == Status::kIgnored) {
      return report_.ignored.push_back(path);
    }
    return asks_for_something(value) ? refuse(path, value) : note_off(path);
  }

  void check_scalar(const KeyRow& row, const Json& value, const std::string& path) {
    std::string wanted;
    bool rounded = false;
    const std::optional<Value> converted = convert(row, value, wanted, rounded);
    if (!converted.has_value()) {
      return report_.wrong(path, fmt::format("wanted {}, got {}", wanted, show(value)));
    }
    if (rounded) {
      report_.notes.push_back(
          fmt::format("{}: {} rounded to {}", path, show(value), std::get<std::int64_t>(*converted)));
    }
    if (row.status == Status::kIgnored) {
      return report_.ignored.push_back(path);
    }
    if (row.status == Status::kRefused) {
      return asks(row, *converted) ? refuse(path, value) : note_off(path);
    }
    if (row.status == Status::kUnused && wants_something(*converted)) {
      report_.unused.push_back(path);
    }
    values_.set(path, *converted);
  }

  // False, 0 and infinity (no progress lines) ask for what happens anyway.
  static bool wants_something(const Value& value) {
    if (const bool* flag = std::get_if<bool>(&value)) {
      return *flag;
    }
    if (const double* number = std::get_if<double>(&value)) {
      return *number != 0.0 && std::isfinite(*number);
    }
    const std::int64_t* whole = std::get_if<std::int64_t>(&value);
    return whole == nullptr || *whole != 0;
  }

  // Whether the value of an unsupported key differs from off, which is its default.
  static bool asks(const KeyRow& row, const Value& value) {
    if (row.standard == "-") {
      return true;
    }
    const Json off = Json::parse(row.standard);
    if (const bool* flag = std::get_if<bool>(&value)) {
      return off != *flag;
    }
    const std::int64_t* whole = std::get_if<std::int64_t>(&value);
    return whole == nullptr || (*whole > off.get<std::int64_t>() && *whole != 0);
  }

  void take_auto(const KeyRow& row, const std::string& path) {
    switch (row.left_auto) {
      case Auto::kDefault:
        return report_.decided_here.push_back(path);
      case Auto::kAlwaysNeeded:
        return report_.left_over_autos.push_back({path, AutoUse::kAlways});
      case Auto::kOptimizerNeeds:
        return report_.left_over_autos.push_back({path, AutoUse::kOptimizer});
      case Auto::kScheduleNeeds:
        return report_.left_over_autos.push_back({path, AutoUse::kSchedule});
      case Auto::kBatch:
        report_.auto_batch.train = report_.auto_batch.train || path == "train_batch_size";
        report_.auto_batch.micro = report_.auto_batch.micro || path == "train_micro_batch_size_per_gpu";
        report_.auto_batch.accumulation = report_.auto_batch.accumulation || path == "gradient_accumulation_steps";
        return;
    }
  }

  void refuse(const std::string& path, const Json& value) {
    report_.wrong(path, fmt::format("not supported; turn it off or remove it (it is {})", show(value)));
  }

  void note_off(const std::string& path) { report_.refused_off.push_back(path); }

  Report& report_;
  Values& values_;
};

}  // namespace

Values check_tree(const Json& root, Report& report) {
  Values values;
  Checker(report, values).walk(root, "", "");
  return values;
}

}  // namespace pannier::config
