#include <fmt/format.h>

#include <charconv>
#include <limits>
#include <span>

#include <nlohmann/json.hpp>

#include "pannier/base/error.h"
#include "pannier/ckpt/manifest.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/strict_json.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {

using nlohmann::json;

namespace {

// JSON's numbers are doubles to many readers, so checksums are 16 hexadecimal digits.
std::string hex(std::uint64_t sum) { return fmt::format("{:016x}", sum); }

std::uint64_t sum_of(const json& value, const std::string& file, const std::string& where) {
  const std::string text = text_of(value, file, where);
  std::uint64_t sum = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), sum, 16);
  if (error != std::errc() || end != text.data() + text.size() || text != hex(sum)) {
    bad_content(file, fmt::format("{}: 16 hexadecimal digits were expected, got '{}'", where, text));
  }
  return sum;
}

int rank_of(const json& value, const std::string& file, const std::string& where) {
  const std::int64_t count = count_of(value, file, where);
  if (count > std::numeric_limits<int>::max()) {
    bad_content(file, fmt::format("{}: {} is too many", where, count));
  }
  return static_cast<int>(count);
}

std::uint64_t text_checksum(const std::string& text) { return checksum(std::as_bytes(std::span(text))); }

TensorInfo parse_tensor(const json& item, const std::string& file) {
  TensorInfo info;
  info.name = text_of(member(item, "name", file, "tensors"), file, "tensors name");
  const std::string where = fmt::format("tensor '{}'", info.name);
  const std::string type = text_of(member(item, "dtype", file, where), file, where);
  const auto dtype = dtype_from_name(type);
  if (!dtype) {
    bad_content(file, fmt::format("{}: unknown dtype '{}'", where, type));
  }
  info.dtype = *dtype;
  for (const auto& size : array_of(member(item, "shape", file, where), file, where)) {
    info.shape.push_back(count_of(size, file, where + " shape"));
  }
  return info;
}

ManifestShard parse_shard(const json& item, const std::string& file) {
  ManifestShard shard;
  shard.tensor = text_of(member(item, "tensor", file, "shards"), file, "shards tensor");
  const std::string where = fmt::format("shard of tensor '{}'", shard.tensor);
  shard.file = text_of(member(item, "file", file, where), file, where + " file");
  shard.key = text_of(member(item, "key", file, where), file, where + " key");
  shard.begin = count_of(member(item, "begin", file, where), file, where + " begin");
  shard.end = count_of(member(item, "end", file, where), file, where + " end");
  for (const auto& sum : array_of(member(item, "checksums", file, where), file, where + " checksums")) {
    shard.checksums.push_back(sum_of(sum, file, where + " checksums"));
  }
  return shard;
}

void parse_written(const json& root, const std::string& file, Share& share) {
  const auto list = [&](const char* key) -> const json& {
    return array_of(member(root, key, file, "manifest"), file, key);
  };
  for (const auto& item : list("files")) {
    share.files.push_back(
        {text_of(member(item, "name", file, "files"), file, "files name"),
         static_cast<std::uint64_t>(count_of(member(item, "nbytes", file, "files"), file, "files nbytes"))});
  }
  for (const auto& item : list("shards")) {
    share.shards.push_back(parse_shard(item, file));
  }
  for (const auto& item : list("extras")) {
    share.extras.push_back({rank_of(member(item, "rank", file, "extras"), file, "extras rank"),
                            text_of(member(item, "file", file, "extras"), file, "extras file"),
                            sum_of(member(item, "checksum", file, "extras"), file, "extras checksum")});
  }
}

json json_of(const std::vector<ManifestFile>& files, const std::vector<ManifestShard>& shards,
             const std::vector<ManifestExtra>& extras) {
  json root = {{"files", json::array()}, {"shards", json::array()}, {"extras", json::array()}};
  for (const auto& each : files) {
    root["files"].push_back({{"name", each.name}, {"nbytes", each.nbytes}});
  }
  for (const auto& shard : shards) {
    json sums = json::array();
    for (const std::uint64_t sum : shard.checksums) {
      sums.push_back(hex(sum));
    }
    root["shards"].push_back({{"file", shard.file},
                              {"key", shard.key},
                              {"tensor", shard.tensor},
                              {"begin", shard.begin},
                              {"end", shard.end},
                              {"checksums", std::move(sums)}});
  }
  for (const auto& extra : extras) {
    root["extras"].push_back({{"rank", extra.rank}, {"file", extra.file}, {"checksum", hex(extra.checksum)}});
  }
  return root;
}

void parse_members(const json& root, const std::string& file, Manifest& manifest) {
  const auto list = [&](const char* key) -> const json& {
    return array_of(member(root, key, file, "manifest"), file, key);
  };
  manifest.step = count_of(member(root, "step", file, "manifest"), file, "step");
  manifest.world_size = rank_of(member(root, "world_size", file, "manifest"), file, "world_size");
  const json& attributes = member(root, "attributes", file, "manifest");
  if (!attributes.is_object()) {
    bad_content(file, fmt::format("attributes: an object was expected, got {}", shown(attributes)));
  }
  for (const auto& [key, value] : attributes.items()) {
    manifest.attributes[key] = text_of(value, file, fmt::format("attribute '{}'", key));
  }
  for (const auto& item : list("tensors")) {
    manifest.tensors.push_back(parse_tensor(item, file));
  }
  Share written;
  parse_written(root, file, written);
  manifest.files = std::move(written.files);
  manifest.shards = std::move(written.shards);
  manifest.extras = std::move(written.extras);
}

}  // namespace

Manifest parse_manifest(std::string_view text, const std::string& file) {
  json root = parse_strict_json(text, file);
  const std::int64_t version = count_of(member(root, "format_version", file, "manifest"), file, "format_version");
  if (version > kManifestVersion || version < 1) {
    bad_content(file, fmt::format("format version {}; this version of Pannier reads 1 to {}: a newer one is needed",
                                  version, kManifestVersion));
  }
  const std::uint64_t sum = sum_of(member(root, "checksum", file, "manifest"), file, "checksum");
  root.erase("checksum");
  if (const std::uint64_t found = text_checksum(root.dump()); found != sum) {
    bad_content(file, fmt::format("its checksum is {}, {} was expected: it was changed", hex(found), hex(sum)));
  }
  Manifest manifest;
  parse_members(root, file, manifest);
  manifest.validate(file);
  return manifest;
}

std::string format_manifest(const Manifest& manifest) {
  json root = json_of(manifest.files, manifest.shards, manifest.extras);
  root["format_version"] = kManifestVersion;
  root["step"] = manifest.step;
  root["world_size"] = manifest.world_size;
  root["attributes"] = manifest.attributes;
  root["tensors"] = json::array();
  for (const auto& info : manifest.tensors) {
    root["tensors"].push_back(
        {{"name", info.name}, {"dtype", std::string(dtype_name(info.dtype))}, {"shape", info.shape}});
  }
  try {
    root["checksum"] = hex(text_checksum(root.dump()));
    return root.dump();
  } catch (const json::exception& error) {
    throw ConfigError(fmt::format("a name in the manifest is not UTF-8: {}", error.what()));
  }
}

std::string format_share(const Share& share) { return json_of(share.files, share.shards, share.extras).dump(); }

Share parse_share(std::string_view text, const std::string& whose) {
  Share share;
  parse_written(parse_strict_json(text, whose), whose, share);
  return share;
}

}  // namespace pannier::ckpt
