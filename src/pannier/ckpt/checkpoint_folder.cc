#include "pannier/ckpt/checkpoint_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <tuple>

#include "pannier/base/error.h"
#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/safetensors_reader.h"
#include "pannier/ckpt/share.h"
#include "pannier/ckpt/strict_json.h"
#include "pannier/io/checksum.h"

namespace pannier::ckpt {
namespace {

constexpr const char* kPartialManifest = "manifest.json.partial";

// One chunk at a time, so that memory stays small.
void verify_shard(const SafetensorsReader& reader, const ManifestShard& shard, const TensorInfo& tensor,
                  const std::string& path, std::vector<std::byte>& buffer) {
  const auto* const entry = reader.find(shard.key);
  if (entry == nullptr || entry->info.dtype != tensor.dtype || entry->numel != shard.end - shard.begin) {
    bad_content(path, fmt::format("{} {} elements were expected as '{}'", shard.end - shard.begin,
                                  dtype_name(tensor.dtype), shard.key));
  }
  const std::size_t element = dtype_nbytes(tensor.dtype);
  std::int64_t at = shard.begin;
  for (const std::uint64_t wanted : shard.checksums) {
    const std::int64_t end = std::min(shard.end, (at / kChunkElements + 1) * kChunkElements);
    buffer.resize(static_cast<std::size_t>(end - at) * element);
    reader.read(shard.key, at - shard.begin, buffer);
    if (const std::uint64_t found = checksum(buffer); found != wanted) {
      bad_content(path, fmt::format("tensor '{}', elements {} to {}: checksum {:016x}, {:016x} was expected",
                                    shard.tensor, at, end, found, wanted));
    }
    at = end;
  }
}

void verify_extra(const SealedFolder& folder, const ManifestExtra& extra) {
  if (const std::uint64_t found = file_checksum(folder, extra.file); found != extra.checksum) {
    bad_content(folder.path() + "/" + extra.file,
                fmt::format("checksum {:016x}, {:016x} was expected", found, extra.checksum));
  }
}

// Keeps what went wrong as a sentence and goes on.
template <class Body>
void note_failure(std::vector<std::string>& problems, const Body& body) {
  try {
    body();
  } catch (const IoError& error) {
    problems.emplace_back(error.what());
  }
}

}  // namespace

std::vector<TagInfo> CheckpointFolder::tags() const {
  std::vector<TagInfo> tags;
  for (const auto& name : folder_.names()) {
    try {
      const SealedFolder folder = folder_.folder(name);
      TagInfo info{.tag = name};
      try {
        const Manifest manifest = read_manifest(folder);
        info.step = manifest.step;
        for (const auto& each : manifest.files) {
          info.nbytes += each.nbytes;
        }
        check_sizes(folder, manifest);
      } catch (const IoError& error) {
        info.problem = error.what();
      }
      tags.push_back(std::move(info));
    } catch (const IoError& error) {
      if (error.error_number() != ENOTDIR && error.error_number() != ELOOP) {
        throw;
      }
    }
  }
  return tags;
}

std::optional<std::string> CheckpointFolder::latest() const {
  std::string text;
  try {
    text = folder_.read_text(kLatestName, 4096);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) {
      return std::nullopt;
    }
    throw;
  }
  text.erase(text.find_last_not_of(" \r\n") + 1);
  if (!is_plain_name(text)) {
    bad_content(folder_.path() + "/" + kLatestName, fmt::format("'{}' is no tag", text));
  }
  return text;
}

void CheckpointFolder::set_latest(const std::string& tag) const {
  static_cast<void>(read_manifest(folder_.folder(tag)));
  folder_.sync();
  const SealedFolderLock lock(folder_);  // Saves under other tags write their own on the way.
  folder_.write_text(kLatestName, tag);
}

std::optional<std::string> CheckpointFolder::newest_complete() const {
  std::optional<std::string> named;
  try {
    named = latest();
  } catch (const IoError&) {
    named.reset();  // Only breaks ties here.
  }
  std::optional<TagInfo> best;
  const auto rank = [&](const TagInfo& info) { return std::tuple(info.step, named == info.tag, info.tag); };
  for (auto& info : tags()) {
    if (info.is_complete() && (!best || rank(*best) < rank(info))) {
      best = std::move(info);
    }
  }
  return best ? std::optional(best->tag) : std::nullopt;
}

std::vector<std::string> CheckpointFolder::verify(const std::string& tag) const {
  std::vector<std::string> problems;
  note_failure(problems, [&] {
    const SealedFolder folder = folder_.folder(tag);
    const Manifest manifest = read_manifest(folder);
    std::map<std::string, const TensorInfo*> tensors;
    for (const auto& tensor : manifest.tensors) {
      tensors[tensor.name] = &tensor;
    }
    std::map<std::string, std::vector<const ManifestShard*>> by_file;
    for (const auto& shard : manifest.shards) {
      by_file[shard.file].push_back(&shard);
    }
    note_failure(problems, [&] { check_sizes(folder, manifest); });
    std::vector<std::byte> buffer;
    for (const auto& [file, shards] : by_file) {
      note_failure(problems, [&] {
        const SafetensorsReader reader(folder, file);
        for (const auto* shard : shards) {
          note_failure(problems, [&] {
            verify_shard(reader, *shard, *tensors.at(shard->tensor), folder.path() + "/" + file, buffer);
          });
        }
      });
    }
    for (const auto& extra : manifest.extras) {
      note_failure(problems, [&] { verify_extra(folder, extra); });
    }
  });
  return problems;
}

std::vector<std::string> CheckpointFolder::remove_leftovers(const std::string& tag) const {
  const SealedFolder folder = folder_.folder(tag);
  const Manifest manifest = read_manifest(folder);
  std::set<std::string> kept = {kManifestName};
  for (const auto& each : manifest.files) {
    kept.insert(each.name);
  }
  std::vector<std::string> removed;
  for (const auto& name : folder.names()) {
    // What the user put beside them stays.
    if (!kept.contains(name) && (name.starts_with(kFilePrefix) || name == kPartialManifest)) {
      folder.remove(name);
      removed.push_back(name);
    }
  }
  folder.sync();
  return removed;
}

std::vector<std::string> CheckpointFolder::prune(int keep) const {
  if (keep < 1) {
    throw ConfigError(fmt::format("keep must be at least 1, got {}", keep));
  }
  const std::optional<std::string> named = latest();
  std::vector<TagInfo> complete;
  for (auto& info : tags()) {
    if (info.is_complete()) {
      complete.push_back(std::move(info));
    }
  }
  std::sort(complete.begin(), complete.end(),
            [](const TagInfo& a, const TagInfo& b) { return std::tie(a.step, a.tag) > std::tie(b.step, b.tag); });
  std::vector<std::string> removed;
  for (std::size_t i = static_cast<std::size_t>(keep); i < complete.size(); ++i) {
    const std::string& tag = complete[i].tag;
    if (named == tag) {
      continue;
    }
    const SealedFolder folder = folder_.folder(tag);
    const std::optional<SealedFolderLock> lock = SealedFolderLock::unless_taken(folder);
    if (!lock) {
      continue;  // It is being saved anew.
    }
    const Manifest manifest = read_manifest(folder);
    folder.remove(kManifestName);
    folder.sync();
    for (const auto& each : manifest.files) {
      folder.remove(each.name);
    }
    // What the user put beside it stays, and its folder with it.
    if (folder.names().empty()) {
      folder_.remove(tag);
    }
    removed.push_back(tag);
  }
  folder_.sync();
  return removed;
}

}  // namespace pannier::ckpt
