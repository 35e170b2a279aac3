// Brings a tree into the shape of the key table: nested, under the names that the table has.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "pannier/engine/config_keys.h"
#include "pannier/engine/config_tree.h"

namespace pannier::config {
namespace {

constexpr const char* kZero = "zero_optimization";

// The object that holds the last part of `path`, or null where there is none.
Json* holder_of(Json& root, const std::vector<std::string_view>& parts) {
  Json* holder = &root;
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    const auto found = holder->find(std::string(parts[i]));
    if (found == holder->end() || !found->is_object()) {
      return nullptr;
    }
    holder = &*found;
  }
  return holder;
}

// Sets the value of a dotted path, with the objects around it. False if the path is taken.
bool place(Json& root, std::string_view path, Json value) {
  Json* at = &root;
  for (const std::string_view part : split(path, '.')) {
    if (at->is_null()) {
      *at = Json::object();
    }
    if (!at->is_object()) {
      return false;
    }
    at = &(*at)[std::string(part)];
  }
  if (!at->is_null()) {
    return false;
  }
  *at = std::move(value);
  return true;
}

// Libraries write such sizes dotted into a configuration that may have them nested already. They tune and decide
// nothing, and DeepSpeed does not read dotted keys, so the nested one holds.
bool is_size(std::string_view key) { return key.ends_with("_bucket_size") || key.ends_with("_threshold"); }

void expand_dotted(Json& root, Report& report) {
  std::vector<std::string> dotted;
  for (const auto& item : root.items()) {
    if (item.key().find('.') != std::string::npos) {
      dotted.push_back(item.key());
    }
  }
  for (const std::string& key : dotted) {
    Json value = std::move(root[key]);
    root.erase(key);
    if (place(root, key, std::move(value))) {
      report.notes.push_back(fmt::format("{}: a dotted key, read as nested", key));
    } else if (is_size(key)) {
      report.notes.push_back(fmt::format("{}: given dotted and nested; the nested one holds", key));
    } else {
      report.wrong(key, "given twice, dotted and nested");
    }
  }
}

void rename_aliases(Json& root, Report& report) {
  for (const Alias& alias : aliases()) {
    const std::vector<std::string_view> parts = split(alias.written, '.');
    Json* holder = holder_of(root, parts);
    const std::string leaf(parts.back());
    if (holder == nullptr || !holder->contains(leaf) || leaf.starts_with("cpu_offload")) {
      continue;
    }
    Json value = std::move((*holder)[leaf]);
    holder->erase(leaf);
    const std::string meant(alias.meant);
    if (!place(root, meant, std::move(value))) {
      report.wrong(std::string(alias.written), fmt::format("given beside {}, which means the same", meant));
      continue;
    }
    report.written_as[meant] = alias.written;
    report.notes.push_back(
        fmt::format("{}: {}, read as {}", alias.written, alias.deprecated ? "deprecated" : "another name", meant));
  }
}

// Takes a deprecated boolean out of zero_optimization; false where it is not there or not a boolean.
bool take_flag(Json& zero, const std::string& key, Report& report) {
  if (!zero.contains(key)) {
    return false;
  }
  const Json value = zero[key];
  zero.erase(key);
  const std::string path = fmt::format("{}.{}", kZero, key);
  if (!value.is_boolean() && !value.is_null() && value != "auto") {
    report.wrong(path, fmt::format("wanted true or false, got {}", show(value)));
  }
  return value == true;
}

// cpu_offload and its kin: booleans of old releases, each of which stands for a section of today.
void replace_cpu_offload(Json& zero, Report& report) {
  const bool has_pin = zero.contains("cpu_offload_use_pin_memory");
  const bool pin = take_flag(zero, "cpu_offload_use_pin_memory", report);
  bool pin_used = false;
  for (const auto& [old, section] :
       {std::pair{"cpu_offload", "offload_optimizer"}, std::pair{"cpu_offload_param", "offload_param"}}) {
    const bool was_there = zero.contains(old);
    const bool on = take_flag(zero, old, report);
    if (on && zero.contains(section) && !zero[section].is_null()) {
      report.wrong(fmt::format("{}.{}", kZero, old),
                   fmt::format("given together with {}.{}; keep the latter", kZero, section));
    } else if (on) {
      zero[section] = Json{{"device", "cpu"}};
      if (has_pin) {
        zero[section]["pin_memory"] = pin;
        pin_used = true;
      }
    }
    if (was_there) {
      report.notes.push_back(fmt::format("{}.{}: deprecated; write \"{}\": {{\"device\": \"{}\"}}", kZero, old, section,
                                         on ? "cpu" : "none"));
    }
  }
  if (has_pin) {
    report.notes.push_back(
        fmt::format("{}.cpu_offload_use_pin_memory: deprecated{}; write pin_memory in "
                    "offload_optimizer or offload_param",
                    kZero, pin_used ? "" : " and without effect"));
  }
}

}  // namespace

void normalize_tree(Json& root, Report& report) {
  expand_dotted(root, report);
  if (root.contains(kZero) && root[kZero].is_boolean()) {
    const int stage = root[kZero] == true ? 1 : 0;
    root[kZero] = Json{{"stage", stage}};
    report.notes.push_back(fmt::format("{}: a boolean is deprecated, read as {{\"stage\": {}}}", kZero, stage));
  }
  rename_aliases(root, report);
  if (root.contains(kZero) && root[kZero].is_object()) {
    replace_cpu_offload(root[kZero], report);
  }
}

}  // namespace pannier::config
