#include "pannier/ckpt/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/strict_json.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {
namespace {

constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30;

std::set<std::string> check_files(const Manifest& manifest, const std::string& file) {
  std::set<std::string> names;
  for (const auto& each : manifest.files) {
    if (!is_plain_name(each.name) || each.name == kManifestName) {
      bad_content(file, fmt::format("'{}' is no name for a file of a checkpoint", each.name));
    }
    if (!names.insert(each.name).second) {
      bad_content(file, fmt::format("file '{}' is listed twice", each.name));
    }
  }
  return names;
}

using Shards = std::map<std::string, std::vector<const ManifestShard*>>;

// The shards of each tensor, sorted; marks the files that they use.
Shards sort_shards(const Manifest& manifest, const std::set<std::string>& files, std::set<std::string>& used,
                   const std::string& file) {
  Shards shards;
  std::set<std::pair<std::string, std::string>> keys;
  for (const auto& shard : manifest.shards) {
    if (!files.contains(shard.file)) {
      bad_content(file,
                  fmt::format("a shard of tensor '{}' is in '{}', which is not listed", shard.tensor, shard.file));
    }
    if (!keys.emplace(shard.file, shard.key).second) {
      bad_content(file, fmt::format("two shards are '{}' in file '{}'", shard.key, shard.file));
    }
    if (shard.begin < 0 || shard.end <= shard.begin) {
      bad_content(file,
                  fmt::format("tensor '{}': elements {} to {} are no range", shard.tensor, shard.begin, shard.end));
    }
    if (shard.checksums.size() != num_chunks(shard.begin, shard.end)) {
      bad_content(file,
                  fmt::format("tensor '{}': {} checksums for elements {} to {}, {} were expected", shard.tensor,
                              shard.checksums.size(), shard.begin, shard.end, num_chunks(shard.begin, shard.end)));
    }
    used.insert(shard.file);
    shards[shard.tensor].push_back(&shard);
  }
  for (auto& [name, list] : shards) {
    std::sort(list.begin(), list.end(),
              [](const auto* a, const auto* b) { return std::tie(a->begin, a->end) < std::tie(b->begin, b->end); });
  }
  return shards;
}

void check_coverage(const TensorInfo& tensor, const std::vector<const ManifestShard*>& shards,
                    const std::string& file) {
  const auto numel = tensor.checked_numel();
  if (!numel) {
    bad_content(file, fmt::format("tensor '{}' has a shape with more bytes than can be", tensor.name));
  }
  std::int64_t at = 0;
  for (const auto* shard : shards) {
    if (shard->begin != at) {
      bad_content(file, fmt::format("tensor '{}': a shard starts at element {}, {} was expected", tensor.name,
                                    shard->begin, at));
    }
    at = shard->end;
  }
  if (at != *numel) {
    bad_content(file,
                fmt::format("tensor '{}': its shards end at element {}, {} was expected", tensor.name, at, *numel));
  }
}

void check_extras(const Manifest& manifest, const std::set<std::string>& files, std::set<std::string>& used,
                  const std::string& file) {
  for (const auto& extra : manifest.extras) {
    if (extra.rank < 0 || extra.rank >= manifest.world_size) {
      bad_content(file, fmt::format("file '{}' is of rank {} of {}", extra.file, extra.rank, manifest.world_size));
    }
    if (!files.contains(extra.file) || !used.insert(extra.file).second) {
      bad_content(file, fmt::format("file '{}' of rank {} is not listed, or has another use", extra.file, extra.rank));
    }
  }
}

}  // namespace

void Manifest::validate(const std::string& file) const {
  if (step < 0 || world_size < 1) {
    bad_content(file, fmt::format("step {} of {} ranks: at least 0 and 1 were expected", step, world_size));
  }
  const std::set<std::string> names = check_files(*this, file);
  std::set<std::string> used;
  Shards by_tensor = sort_shards(*this, names, used, file);
  std::set<std::string> known;
  for (const auto& tensor : tensors) {
    if (!known.insert(tensor.name).second) {
      bad_content(file, fmt::format("tensor '{}' is there twice", tensor.name));
    }
    check_coverage(tensor, by_tensor[tensor.name], file);
  }
  for (const auto& [name, list] : by_tensor) {
    if (!known.contains(name)) {
      bad_content(file, fmt::format("there are shards of '{}', which is no tensor of it", name));
    }
  }
  check_extras(*this, names, used, file);
  for (const auto& name : names) {
    if (!used.contains(name)) {
      bad_content(file, fmt::format("file '{}' is listed, but nothing is in it", name));
    }
  }
}

std::size_t num_chunks(std::int64_t begin, std::int64_t end) noexcept {
  return end <= begin ? 0 : static_cast<std::size_t>((end - 1) / kChunkElements - begin / kChunkElements + 1);
}

std::vector<std::uint64_t> chunk_checksums(std::span<const std::byte> bytes, std::int64_t begin,
                                           std::size_t element_nbytes) {
  std::vector<std::uint64_t> sums;
  auto left = static_cast<std::size_t>(kChunkElements - begin % kChunkElements) * element_nbytes;
  while (!bytes.empty()) {
    const std::size_t nbytes = std::min(bytes.size(), left);
    sums.push_back(checksum(bytes.first(nbytes)));
    bytes = bytes.subspan(nbytes);
    left = static_cast<std::size_t>(kChunkElements) * element_nbytes;
  }
  return sums;
}

Manifest read_manifest(const SealedFolder& folder) {
  return parse_manifest(folder.read_text(kManifestName, kMaxManifestBytes), folder.path() + "/" + kManifestName);
}

void write_manifest(const SealedFolder& folder, const Manifest& manifest) {
  const std::string path = folder.path() + "/" + kManifestName;
  manifest.validate(path);
  // The shards' names must be durable before the name that promises them.
  folder.sync();
  folder.write_text(kManifestName, format_manifest(manifest));
}

}  // namespace pannier::ckpt
