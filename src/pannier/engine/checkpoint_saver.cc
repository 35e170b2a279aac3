#include "pannier/engine/checkpoint_saver.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include "pannier/base/error.h"
#include "pannier/base/log.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/comm/collective_error.h"
#include "pannier/engine/checkpoint_buffers.h"
#include "pannier/engine/shared_outcome.h"
#include "pannier/io/engines.h"

namespace pannier {
namespace {

void make_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    throw IoError(fmt::format("make folder '{}'", path), error.value());
  }
}

// The folder's own name must be durable too, or what is in it is lost with it.
void sync_parents(const SavePlace& place) {
  ckpt::SealedFolder(place.folder).sync();
  const auto parent = std::filesystem::absolute(place.folder).lexically_normal().parent_path();
  ckpt::SealedFolder(parent.empty() ? "/" : parent.string()).sync();
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

class EndOfReading {
 public:
  EndOfReading(StateSnapshot* snapshot, std::atomic<bool>& is_read) : snapshot_(snapshot), is_read_(is_read) {}
  ~EndOfReading() {
    if (snapshot_ != nullptr) {
      snapshot_->end();
    }
    is_read_ = true;
    is_read_.notify_all();
  }
  EndOfReading(const EndOfReading&) = delete;
  EndOfReading& operator=(const EndOfReading&) = delete;

 private:
  StateSnapshot* snapshot_;
  std::atomic<bool>& is_read_;
};

}  // namespace

CheckpointSave::CheckpointSave(const SaveParts& parts, const SaveOptions& options, const SavePlace& place,
                               const CheckpointContents& contents, std::int64_t step,
                               const std::map<std::string, std::string>& attributes)
    : parts_(parts), options_(options), place_(place) {
  const c10::NoGradGuard no_grad;
  agree(contents);
  channel_ = parts_.ranks.open_channel("save/" + save_);
  try {
    prepare(contents);
    contents_.manifest.step = step;
    contents_.manifest.attributes.insert(attributes.begin(), attributes.end());
  } catch (...) {
    unprepared_ = std::current_exception();  // For the thread, whom the other ranks' threads will ask.
  }
  thread_ = std::thread([this] { work(); });
}

CheckpointSave::~CheckpointSave() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

void CheckpointSave::finish() {
  if (thread_.joinable()) {
    thread_.join();
  }
  snapshot_.reset();
  pieces_.reset();
  mover_.reset();
  if (failed_) {
    std::rethrow_exception(std::exchange(failed_, nullptr));
  }
}

// What a rank says: its tag, a name for the save, and the sums of its buffers.
void CheckpointSave::agree(const CheckpointContents& contents) {
  const std::vector<std::string> said = done_by_all(parts_.ranks, "the tag of a checkpoint", [&] {
    if (!ckpt::is_plain_name(place_.tag)) {
      throw ConfigError(fmt::format("'{}' is no tag: letters, digits and {} only, and 255 of them at most", place_.tag,
                                    ckpt::kPlainSigns));
    }
    if (place_.tag == ckpt::kLatestName) {
      throw ConfigError(fmt::format("'{}' is no tag: the file of that name says which one is", place_.tag));
    }
    make_folders(place_.folder + "/" + place_.tag);
    if (parts_.ranks.rank() == 0) {
      lock_ = ckpt::SealedFolderLock::unless_taken(ckpt::SealedFolder(place_.folder).folder(place_.tag));
      if (!lock_) {
        throw IoError(fmt::format("save_checkpoint(): another engine or process is saving into '{}/{}', or removes it",
                                  place_.folder, place_.tag),
                      EBUSY);
      }
    }
    std::string text = fmt::format("{} {}", place_.tag, ckpt::new_save_name());
    if (parts_.ranks.world_size() > 1) {
      for (const std::uint64_t sum : buffer_sums(parts_.device, contents.buffers)) {
        text += fmt::format(" {:x}", sum);
      }
    }
    return text;
  });
  std::vector<std::string> tags;
  for (const auto& text : said) {
    tags.push_back(words_of(text).front());
  }
  const std::vector<std::string> first = words_of(said.front());
  place_.tag = choose_tag(tags);
  save_ = first.at(1);
  path_ = place_.folder + "/" + place_.tag;
  for (std::size_t i = 2; i < first.size(); ++i) {
    buffer_sums_.push_back(std::stoull(first[i], nullptr, 16));
  }
}

std::string CheckpointSave::choose_tag(const std::vector<std::string>& tags) const {
  const auto other = std::find_if(tags.begin(), tags.end(), [&](const auto& tag) { return tag != tags.front(); });
  if (other != tags.end() && options_.validation != TagValidation::kIgnore) {
    const std::string message = fmt::format("save_checkpoint() was given tag '{}' on rank {}, '{}' on rank 0", *other,
                                            other - tags.begin(), tags.front());
    if (options_.validation == TagValidation::kFail) {
      throw ConfigError(message);
    }
    if (parts_.ranks.rank() == 0) {
      log::warning(message + ", which all use");
    }
  }
  return tags.front();
}

void CheckpointSave::prepare(const CheckpointContents& contents) {
  contents_ = take_contents(parts_.device, parts_.ranks, parts_.parts, contents, buffer_sums_);
  std::uint64_t nbytes = 0;
  for (const auto& frozen : contents_.frozen) {
    nbytes += frozen.tensor.nbytes();
  }
  if (const auto parameters = partitioned_of(parts_.parts, contents.frozen); !parameters.empty()) {
    pieces_ = with_room(parts_.memory, spare_, [&](HostMemory& memory) {
      return std::make_unique<FrozenPieces>(parts_.device, memory, *parts_.parts, parameters);
    });
    nbytes += pieces_->nbytes();
  }
  if (parts_.parts != nullptr) {
    nbytes = std::max(nbytes, rank_files_nbytes(*parts_.parts));
  }
  mover_ = make_mover(parts_.memory, spare_, ckpt::FileMoverOptions::for_files_of(nbytes));
  if (parts_.parts != nullptr) {
    const StateSnapshotOptions options{parts_.parts->nvme_states.get(), options_.delay_seed};
    snapshot_ = with_room(parts_.memory, spare_, [&](HostMemory& memory) {
      return std::make_unique<StateSnapshot>(parts_.parts->pipeline->parts(), memory, options);
    });
  }
}

void CheckpointSave::wait_read() noexcept {
  if (snapshot_ != nullptr) {
    snapshot_->wait_read();
  }
  if (pieces_ != nullptr) {
    is_read_.wait(false);
  }
}

void CheckpointSave::work() noexcept {
  detail::block_signals();
  try {
    const c10::NoGradGuard no_grad;
    write_and_commit();
  } catch (...) {
    failed_ = std::current_exception();
  }
  lock_.reset();
  has_ended_ = true;
}

void CheckpointSave::write_and_commit() {
  std::vector<std::string> shares;
  try {
    shares = done_by_all(*channel_, "the shares of a checkpoint", [&] {
      const EndOfReading end(snapshot_.get(), is_read_);  // Before the other ranks are waited for.
      if (unprepared_) {
        std::rethrow_exception(unprepared_);
      }
      const ckpt::SealedFolder folder = ckpt::SealedFolder(place_.folder).folder(place_.tag);
      const ckpt::Share share = write_rank_files({folder, save_, parts_.ranks.rank()}, *mover_, parts_.device,
                                                 parts_.parts, snapshot_.get(), pieces_.get(), contents_);
      folder.sync();
      return format_share(share);
    });
  } catch (const CollectiveError&) {
    throw;  // Rank 0 may have heard of all shares, and be about to name them.
  } catch (...) {
    // Nothing will ever name them, and the disk may be full.
    remove_rank_files({ckpt::SealedFolder(path_), save_, parts_.ranks.rank()});
    throw;
  }
  (void)done_by_all(*channel_, "the commit of a checkpoint", [&] {
    if (parts_.ranks.rank() == 0) {
      commit(shares);
    }
    return std::string();
  });
}

void CheckpointSave::commit(const std::vector<std::string>& shares) {
  ckpt::Share written;
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    written.append(ckpt::parse_share(shares[rank], fmt::format("the share of rank {}", rank)));
  }
  ckpt::Manifest& manifest = contents_.manifest;
  manifest.files = std::move(written.files);
  manifest.shards = std::move(written.shards);
  manifest.extras = std::move(written.extras);
  sync_parents(place_);
  write_manifest(ckpt::SealedFolder(place_.folder).folder(place_.tag), manifest);
  const ckpt::CheckpointFolder folder(place_.folder);
  if (place_.set_latest) {
    folder.set_latest(place_.tag);
  }
  (void)folder.remove_leftovers(place_.tag);
}

}  // namespace pannier
