#include "pannier/ckpt/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "pannier/base/error.h"
#include "pannier/ckpt/strict_json.h"

namespace pannier::ckpt {

using nlohmann::json;

namespace {

constexpr const char* kMetadataKey = "__metadata__";
constexpr std::size_t kLengthBytes = 8;

SafetensorsEntry parse_entry(const std::string& name, const json& value, std::uint64_t data_nbytes,
                             const std::string& file) {
  const std::string where = fmt::format("tensor '{}'", name);
  SafetensorsEntry entry;
  entry.info.name = name;
  const std::string type = text_of(member(value, "dtype", file, where), file, where + " dtype");
  const auto dtype = dtype_from_name(type);
  if (!dtype) {
    bad_content(file, fmt::format("{}: unknown dtype '{}'", where, type));
  }
  entry.info.dtype = *dtype;
  for (const auto& size : array_of(member(value, "shape", file, where), file, where + " shape")) {
    entry.info.shape.push_back(count_of(size, file, where + " shape"));
  }
  const auto& offsets = array_of(member(value, "data_offsets", file, where), file, where + " data_offsets");
  if (value.size() != 3) {
    bad_content(file, fmt::format("{}: only dtype, shape and data_offsets were expected, got {}", where, shown(value)));
  }
  if (offsets.size() != 2) {
    bad_content(file, fmt::format("{} data_offsets: two were expected, got {}", where, shown(offsets)));
  }
  entry.begin = static_cast<std::uint64_t>(count_of(offsets[0], file, where + " data_offsets"));
  entry.end = static_cast<std::uint64_t>(count_of(offsets[1], file, where + " data_offsets"));
  if (entry.begin > entry.end || entry.end > data_nbytes) {
    bad_content(file, fmt::format("{} data_offsets: {} are not within the {} bytes of data", where, shown(offsets),
                                  data_nbytes));
  }
  const auto numel = entry.info.checked_numel();
  if (!numel) {
    bad_content(file, fmt::format("{} shape: {} has more bytes than can be", where, shown(value["shape"])));
  }
  entry.numel = *numel;
  const std::uint64_t wanted = static_cast<std::uint64_t>(*numel) * dtype_nbytes(*dtype);
  if (wanted != entry.end - entry.begin) {
    bad_content(file, fmt::format("{}: {} of shape {} needs {} bytes, its data_offsets hold {}", where, type,
                                  shown(value["shape"]), wanted, entry.end - entry.begin));
  }
  return entry;
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_nbytes, const std::string& file) {
  if (text.empty() || text.front() != '{') {
    bad_content(file, "the header does not start with '{'");
  }
  const json root = parse_strict_json(text, file);
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    if (name != kMetadataKey) {
      header.entries.push_back(parse_entry(name, value, data_nbytes, file));
      continue;
    }
    if (!value.is_object()) {
      bad_content(file, fmt::format("{}: an object was expected, got {}", kMetadataKey, shown(value)));
    }
    for (const auto& [key, item] : value.items()) {
      header.metadata[key] = text_of(item, file, fmt::format("{} '{}'", kMetadataKey, key));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.info.name) < std::tie(b.begin, b.end, b.info.name);
  });
  std::uint64_t at = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin != at) {
      bad_content(file, fmt::format("tensor '{}' starts at byte {} of the data, {} was expected: {}", entry.info.name,
                                    entry.begin, at, entry.begin < at ? "it overlaps another" : "there is a hole"));
    }
    at = entry.end;
  }
  if (at != data_nbytes) {
    bad_content(file, fmt::format("the tensors end at byte {} of the data, the file at {}", at, data_nbytes));
  }
  return header;
}

SafetensorsHeader lay_out_safetensors(const std::vector<TensorInfo>& tensors,
                                      std::map<std::string, std::string> metadata) {
  SafetensorsHeader header;
  header.metadata = std::move(metadata);
  std::set<std::string> names = {kMetadataKey};
  std::uint64_t at = 0;
  for (const auto& info : tensors) {
    if (!names.insert(info.name).second) {
      throw ConfigError(fmt::format("tensor name '{}' is taken", info.name));
    }
    const auto numel = info.checked_numel();
    const auto nbytes = static_cast<std::uint64_t>(numel.value_or(0)) * dtype_nbytes(info.dtype);
    if (!numel || nbytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - at) {
      throw ConfigError(fmt::format("tensor '{}' does not fit a file", info.name));
    }
    header.entries.push_back({info, at, at + nbytes, *numel});
    at += nbytes;
  }
  return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header, std::size_t alignment) {
  if (alignment == 0 || alignment % 8 != 0) {
    throw ConfigError(fmt::format("data_alignment must be a positive multiple of 8, got {}", alignment));
  }
  json root = json::object();
  if (!header.metadata.empty()) {
    root[kMetadataKey] = header.metadata;
  }
  for (const auto& entry : header.entries) {
    root[entry.info.name] = {{"dtype", std::string(dtype_name(entry.info.dtype))},
                             {"shape", entry.info.shape},
                             {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::exception& error) {
    throw ConfigError(fmt::format("a name or metadata is not UTF-8: {}", error.what()));
  }
  text.append((alignment - (kLengthBytes + text.size()) % alignment) % alignment, ' ');
  if (text.size() > kMaxSafetensorsHeaderBytes) {
    throw ConfigError(fmt::format("a header of {} bytes; readers take {}", text.size(), kMaxSafetensorsHeaderBytes));
  }
  std::string head(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    head[i] = static_cast<char>(static_cast<unsigned char>(text.size() >> (8 * i)));
  }
  return head + text;
}

}  // namespace pannier::ckpt
