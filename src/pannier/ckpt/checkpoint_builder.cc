#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/ckpt/checkpoint_folder.h"

namespace pannier::ckpt {
namespace {

const std::string& made_folder(const std::string& folder, const std::string& tag) {
  if (!is_plain_name(tag)) {
    throw ConfigError(fmt::format("'{}' is no tag: letters, digits, '.', '_' and '-' only", tag));
  }
  std::error_code error;
  std::filesystem::create_directories(folder + "/" + tag, error);
  if (error) {
    throw IoError(fmt::format("make folder '{}/{}'", folder, tag), error.value());
  }
  return folder;
}

}  // namespace

CheckpointBuilder::CheckpointBuilder(const std::string& folder, std::string tag, std::vector<TensorInfo> tensors)
    : parent_(made_folder(folder, tag)),
      folder_(SealedFolder(folder).folder(tag)),
      tag_(std::move(tag)),
      tensors_(std::move(tensors)) {
  std::vector<ShareEntry> entries;
  for (const auto& tensor : tensors_) {
    const auto numel = tensor.checked_numel();
    if (!numel) {
      throw ConfigError(fmt::format("tensor '{}' has a shape that can't be", tensor.name));
    }
    entries.push_back({tensor.name, tensor.dtype, 0, *numel});
  }
  writer_ = std::make_unique<ShareWriter>(folder_, share_file_name(new_save_name(), 0, "rank"), std::move(entries));
}

void CheckpointBuilder::write(std::span<const std::byte> bytes) {
  if (next_ >= tensors_.size()) {
    throw ConfigError(fmt::format("a tensor after the last of {}", tensors_.size()));
  }
  const TensorInfo& tensor = tensors_[next_];
  const std::int64_t numel = *tensor.checked_numel();
  const std::size_t width = dtype_nbytes(tensor.dtype);
  if (bytes.size() != static_cast<std::size_t>(numel) * width) {
    throw ConfigError(fmt::format("{} bytes of tensor '{}', {} were expected", bytes.size(), tensor.name,
                                  static_cast<std::size_t>(numel) * width));
  }
  writer_->write(bytes);
  ++next_;
}

void CheckpointBuilder::commit(std::int64_t step, std::map<std::string, std::string> attributes) {
  Share share = writer_->finish();
  write_manifest(folder_, {.step = step,
                           .world_size = 1,
                           .attributes = std::move(attributes),
                           .tensors = tensors_,
                           .files = std::move(share.files),
                           .shards = std::move(share.shards),
                           .extras = {}});
  parent_.set_latest(tag_);
  (void)parent_.remove_leftovers(tag_);
}

}  // namespace pannier::ckpt
