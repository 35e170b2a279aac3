// A folder that names come to from outside (a manifest, a user). Only plain names are let in and no link is followed,
// so that nothing beside the folder is ever read or written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pannier/io/process_files.h"

namespace pannier::ckpt {

/// What names may hold besides letters and digits.
inline constexpr std::string_view kPlainSigns = "._-=+,@%:~()[]";

/// Whether `name` consists of letters, digits and kPlainSigns only, at most 255 of them, and is neither "." nor "..".
[[nodiscard]] bool is_plain_name(std::string_view name) noexcept;

/// Reads exactly `bytes.size()` bytes. Throws IoError naming `file`, offset and bytes; at the end of the file too.
void read_exactly(int fd, std::span<std::byte> bytes, std::uint64_t offset, const std::string& file);
/// Writes all of `bytes`, in requests of at most 1 GiB. Throws IoError naming `file` and offset.
void write_exactly(int fd, std::span<const std::byte> bytes, std::uint64_t offset, const std::string& file);
/// Size of an open regular file. Throws IoError naming `file` when it is not one.
[[nodiscard]] std::uint64_t regular_file_nbytes(int fd, const std::string& file);
/// fsync. Throws IoError naming `file`.
void sync_to_disk(int fd, const std::string& file);

/// An open folder. Move-only; const functions are thread-safe. Names that are not plain throw ConfigError.
class SealedFolder {
 public:
  /// Throws IoError when `path` is no folder.
  explicit SealedFolder(const std::string& path);
  /// The folder `name` in this one. Throws IoError when it is missing, a file or a link.
  [[nodiscard]] SealedFolder folder(const std::string& name) const;
  /// Opens a regular file to read. Throws IoError when it is missing, a link or anything else.
  [[nodiscard]] OwnedFd open_file(const std::string& name) const;
  /// Creates an empty file to write, in place of one with that name.
  [[nodiscard]] OwnedFd create_file(const std::string& name) const;
  /// The whole of a file of at most `max_nbytes`.
  [[nodiscard]] std::string read_text(const std::string& name, std::uint64_t max_nbytes) const;
  /// Puts a file in place at once and for good: another name, fsync, rename, fsync of the folder.
  void write_text(const std::string& name, std::string_view text) const;
  /// Renames within the folder, over what has the name, and syncs the folder.
  void rename(const std::string& from, const std::string& to) const;
  /// Removes a file or an empty folder; one that is gone is as good.
  void remove(const std::string& name) const;
  /// Makes the folder's names durable.
  void sync() const;
  /// All plain names in it, sorted.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  friend class SealedFolderLock;
  SealedFolder(OwnedFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  [[nodiscard]] std::string path_of(const std::string& name) const;

  OwnedFd fd_;
  std::string path_;
};

/// Keeps others who ask for it out of a folder: other processes of the machine, and other locks of this one. Move-only;
/// ends with its process. Where a file system knows no such locks, everybody is let in.
class SealedFolderLock {
 public:
  /// Waits for whoever is in.
  explicit SealedFolderLock(const SealedFolder& folder);
  /// Nothing where somebody is in.
  [[nodiscard]] static std::optional<SealedFolderLock> unless_taken(const SealedFolder& folder);

 private:
  explicit SealedFolderLock(OwnedFd fd) : fd_(std::move(fd)) {}

  OwnedFd fd_;
};

}  // namespace pannier::ckpt
