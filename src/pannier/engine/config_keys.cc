#include "pannier/engine/config_keys.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <utility>

#include "pannier/engine/config.h"

namespace pannier {
namespace config {
namespace {

// Names that people bring from elsewhere and that no count of letters would find.
constexpr auto kForeignNames = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"learning_rate", "lr"},
    {"warmup_steps", "warmup_num_steps"},
    {"num_warmup_steps", "warmup_num_steps"},
    {"total_steps", "total_num_steps"},
    {"num_training_steps", "total_num_steps"},
    {"max_grad_norm", "gradient_clipping"},
    {"clip_grad", "gradient_clipping"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"batch_size", "train_batch_size"},
    {"accumulate_grad_batches", "gradient_accumulation_steps"},
    {"zero", "zero_optimization"},
    {"epsilon", "eps"},
    {"adamw_mode", "adam_w_mode"},
});

std::string_view leaf_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view section_of(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

// Levenshtein's distance: the least number of letters to insert, remove or replace.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) {
    row[j] = j;
  }
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

bool same_letters(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

// Paths that an unknown key may have meant, those of its own section first.
std::vector<std::string_view> candidates(std::string_view section, std::string_view type) {
  std::vector<std::string_view> near;
  std::vector<std::string_view> far;
  for (const KeyRow* row : all_keys()) {
    if (applies_to(*row, type) || section_of(row->path) != section) {
      (section_of(row->path) == section ? near : far).push_back(row->path);
    }
  }
  for (const Alias& alias : aliases()) {
    (section_of(alias.written) == section ? near : far).push_back(alias.written);
  }
  near.insert(near.end(), far.begin(), far.end());
  return near;
}

}  // namespace

std::vector<const KeyRow*> all_keys() {
  std::vector<const KeyRow*> rows;
  for (const auto part : {training_keys(), zero_keys(), other_keys()}) {
    for (const KeyRow& row : part) {
      rows.push_back(&row);
    }
  }
  return rows;
}

const KeyRow* find_key(std::string_view path) {
  for (const auto part : {training_keys(), zero_keys(), other_keys()}) {
    const auto found = std::ranges::find(part, path, &KeyRow::path);
    if (found != part.end()) {
      return &*found;
    }
  }
  return nullptr;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

bool applies_to(const KeyRow& row, std::string_view type) {
  return row.types.empty() || type.empty() ||
         std::ranges::any_of(split(row.types), [&](std::string_view one) { return same_letters(one, type); });
}

std::string advice_for_unknown(const std::string& path, std::string_view type) {
  const std::string_view section = section_of(path);
  std::string_view leaf = leaf_of(path);
  for (const auto& [foreign, ours] : kForeignNames) {
    leaf = leaf_of(path) == foreign ? ours : leaf;
  }
  std::string_view best;
  std::size_t best_distance = leaf.size() / 3 + 2;
  for (const std::string_view candidate : candidates(section, type)) {
    const std::size_t distance = edit_distance(leaf, leaf_of(candidate));
    // Elsewhere only the same word counts, or all but a letter of a long one.
    const bool near = section_of(candidate) == section;
    const bool close = near ? distance < best_distance : distance == 0 || (distance == 1 && leaf.size() > 6);
    if (close && (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  if (!best.empty()) {
    return fmt::format("unknown key; did you mean {}?", best);
  }
  std::vector<std::string_view> siblings;
  for (const KeyRow* row : all_keys()) {
    if (section_of(row->path) == section && applies_to(*row, type)) {
      siblings.push_back(leaf_of(row->path));
    }
  }
  if (section.empty() || siblings.empty()) {
    return "unknown key";
  }
  return fmt::format("unknown key; {} has {}", section, fmt::join(siblings, ", "));
}

}  // namespace config

std::vector<ConfigKey> config_keys() {
  static constexpr std::array<const char*, 4> kStatus{"supported", "ignored", "refused", "unused"};
  std::vector<ConfigKey> keys;
  for (const config::KeyRow* row : config::all_keys()) {
    keys.push_back(
        {std::string(row->path), kStatus.at(static_cast<std::size_t>(row->status)), std::string(row->standard)});
  }
  for (const config::Alias& alias : config::aliases()) {
    keys.push_back({std::string(alias.written), "alias", std::string(alias.meant)});
  }
  return keys;
}

}  // namespace pannier
